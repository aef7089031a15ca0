"""Tensorwire beside other libraries: ``python -m benchmarks``, in the folder of the source. Not part of the package."""
