"""A stand-in with what ``ckptsync-llamafactory`` calls."""
