"""Downloading a checkpoint or a consolidated model from a store into a directory from which a training can resume."""
