"""Stores: somewhere to keep write-once files.

``contract``: the Protocol that every store keeps, and its laws.  ``posix``: a local or NFS path.  ``opening``: from a URL to a store.
``tree``: the files of a local checkpoint (or several overlaid, or some of a store's) as `ckptsync.model.Files`.
"""
