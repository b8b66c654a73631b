"""Stores over SSH: SFTP spoken over the pipes of the system's own `ssh`."""
