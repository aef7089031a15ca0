"""Which worker runs which module, and the stand-ins for other workers' tensors."""
