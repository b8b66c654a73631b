"""Stores: somewhere to keep write-once files.

``contract``: what every store promises, what only some can do, and the base class of wrappers.
``urls``, ``opening``: from a URL to a store.  ``limits``: threads, memory, and one bandwidth for
all transfers.  ``retry``: the one place that tries again.  ``progress_signs``: whether transfers
move, and whether the process ends.  ``clock``: the store's own.  ``oserrors``: the system's errors
as ours.

``posix``, ``s3``, ``sftp``, ``fsspec`` (any other URL), ``memory``: the stores.  ``part_upload``:
files that are sent in parts.

``stream``, ``parallel_download``, ``prefetch``: reading, compared with digests, and ahead.
``checkpoint_files``, ``path_or_url``: the files of a checkpoint, wherever it is.
"""
