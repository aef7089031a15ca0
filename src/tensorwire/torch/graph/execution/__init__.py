"""How a worker runs its partition of a graph: computing, sending, receiving."""
