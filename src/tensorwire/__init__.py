"""Tensorwire: train across processes and machines by one-sided writes."""
