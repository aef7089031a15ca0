"""The processes that a benchmark measures: one small program a workload, driven by lines."""
