"""The passes of the analysis. Each finds one property of a graph; `tensorwire.graph.plan` calls them in order."""
