"""Stores in a directory: a local disk, or NFS.

A killed process or a power cut must leave the old file or the new one, so a new file is written
beside its name and renamed when it is durable. Read `store` (the store contract), then `draft` (the
temporary file), and `publish` (the rename, and durable names).
"""
