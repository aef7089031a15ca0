"""PyTorch models whose parts run on several hosts: captured, analyzed, and run with one-sided writes alone."""
