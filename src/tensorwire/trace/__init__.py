"""What the spans of a job say: the parts of its steps, and trace files of all its processes."""
