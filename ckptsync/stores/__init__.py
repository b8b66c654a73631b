"""Stores: somewhere to keep write-once files.

``contract``: the Protocol that every store keeps, and its laws.  ``posix``: a local or NFS path.  ``memory``: what the contract
means, without a disk.  ``opening``: from a URL to a store.  ``copying``: a stored file in pieces, or under another name.
``tree``: the files of a local checkpoint (or several overlaid, or some of a store's) as `ckptsync.model.Files`.
``posix.draft``, ``posix.commit``, ``posix.ways``: the steps of a write to a path.  ``mounts``: what file system a path is on.
``beneath``, ``openfiles``, ``oserrors``: names below a directory with no link followed; a few files kept open; what an errno means.
"""
