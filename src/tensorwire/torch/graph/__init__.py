"""Models whose parts run on several hosts."""
