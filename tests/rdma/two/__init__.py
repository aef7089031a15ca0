"""Tests that run in the first of two guests; an agent in the second does its part of each."""
