"""Makes torch allocate the output of an operator in chosen memory."""
