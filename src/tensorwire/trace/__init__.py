"""What the spans of a job say: the parts of its steps, trace files of all its processes, and pictures of a step."""
