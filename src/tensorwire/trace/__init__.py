"""What the spans of a job show: the parts of its steps, and trace files of all its processes."""
