"""Pictures, drawn by matplotlib (the extra ``plot``), which is imported only when one is requested."""
