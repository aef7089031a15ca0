"""Versions of a store's parameters for readers outside of the training: never torn, and as files that others map."""
