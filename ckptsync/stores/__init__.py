"""Stores: somewhere to keep write-once files.

``contract``: what every store promises, and the base class of wrappers.  ``capabilities``: what only some can do.  ``urls``, ``opening``: from a URL to a store.
``limits``: threads, memory, and one bandwidth for all transfers.  ``retry``: the one place that tries again.  ``signs``, ``ending``: what tells a transfer that
moves, and a process that ends.

``posix``, ``s3``, ``sftp``, ``generic`` (fsspec), ``memory``: the stores.  ``parts``: files sent in parts.  ``beneath``, ``oserrors``, ``writing``:
files below a directory of this machine, over no link.

``stream``, ``checksum``, ``download``, ``pieces``: reading, compared with digests, and ahead.  ``tree``, ``trees``: the files of a checkpoint, wherever it is.
"""
