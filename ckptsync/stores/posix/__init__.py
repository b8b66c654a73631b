"""Stores in a directory: a local disk, or NFS."""
