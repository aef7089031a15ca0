"""``tensorwire bench``: every figure beside its limit and its peers, in the same run (docs/benchmarks.md)."""
