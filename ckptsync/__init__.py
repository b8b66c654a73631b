"""ckptsync: every finished checkpoint ends up whole and proven in one place."""

__version__ = "0.1.0"
