"""Stores: the one place where all nodes and heads meet, and where checkpoints lie.

Kinds of stores (a directory, S3, SFTP, what fsspec knows) differ in what they promise, and any
write can be killed. So every kind keeps one small contract: files are written once, appear whole or
not at all, and are listed by name. All other packages know the contract alone; what differs between
kinds stays in the module of the kind.

Read `contract` first. `urls` and `opening` lead from a URL to a store, `path_or_url` to whatever
files are there (`checkpoint_files`).

* The stores: `posix`, `s3`, `sftp`, `fsspec` (any other URL), `memory`.
* Uploading: `part_upload` sends a file in parts, several at once.
* Reading: `stream` compares with digests, `parallel_download` fetches files to a directory,
  `prefetch` combines small reads.
* Transfers: `limits` (threads, memory, one bandwidth for the process), `retry` (the one place that
  tries again), `progress_signs` (whether transfers move, and whether the process ends).
* Details: `clock` (the store's own), `oserrors` (the system's errors as ours).
"""
