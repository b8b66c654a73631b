"""Stores of every other kind that fsspec knows."""
