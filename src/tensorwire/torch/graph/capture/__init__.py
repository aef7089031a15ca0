"""What dynamo and AOTAutograd make of a model, and how it becomes a graph of ours."""
