"""Tests that run in one guest with two Soft-RoCE devices, rxa and rxb, on one cable."""
