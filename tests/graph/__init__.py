"""The graph layer: passes on hand-written graphs, and random ones run by a simulator of all workers."""
