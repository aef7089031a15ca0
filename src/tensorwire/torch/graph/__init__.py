"""PyTorch models whose parts run on several workers: captured, analyzed, and run with one-sided writes alone."""
