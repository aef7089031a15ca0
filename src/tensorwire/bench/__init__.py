"""``tensorwire bench``: every figure beside its limit, in the same run (docs/benchmarks.md)."""
