"""How torch allocates the output of an operator in memory of our choice."""
