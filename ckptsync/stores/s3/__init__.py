"""Stores in S3: what a bucket is asked, and how a file gets there in parts."""
