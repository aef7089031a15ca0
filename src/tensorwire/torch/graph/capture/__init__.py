"""Turns what dynamo and AOTAutograd capture of a model into a graph of ours."""
