"""The processes that a benchmark measures: one small program per workload, driven by lines (see ``lines``)."""
