"""Stores in S3, on botocore's client: resumable multipart uploads, checksums, conditional writes.

Read `store` (the store contract), then `multipart_upload` (replacing and creating a key, continuing
an unfinished upload), `requests` (one request, a listing, checksums), `error_codes`, `client`
(options, credentials, endpoints) and `transport` (bandwidth and stalls).
"""
