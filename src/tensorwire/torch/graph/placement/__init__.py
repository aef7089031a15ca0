"""Which worker runs which module, and what stands for the tensors of other workers."""
