"""Stores in S3, on botocore's client: resumable multipart uploads, checksums, and what a server's conditional requests are worth.

Read `store` (the store contract), then `upload` (replacing and creating a key), `multipart` (continuing an unfinished upload),
`bucket` (one request, and a listing), `errors`, `client` (options, credentials, endpoints) and `transport` (bandwidth and stalls).
"""
