"""Stores in S3, on botocore's client: resumable multipart uploads, checksums, conditional writes.

S3 stores objects atomically, but servers differ in what else they promise, and a large upload has
to survive kills. So files go up in parts whose checksums tell a later process what is there, and
each promise is tested on the server before it is used.

Read `store` (the store contract), then `multipart_upload` (replacing and creating a key, continuing
an unfinished upload), `requests` (one request, a listing, checksums), `error_codes`, `client`
(options, credentials, endpoints) and `transport` (bandwidth and stalls).
"""
