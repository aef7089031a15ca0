"""The passes of the analysis: each finds one thing about a graph, and `tensorwire.graph.plan` calls them in order."""
