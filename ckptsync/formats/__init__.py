"""Containers, pure: pickles that are read and never run, torch's archives, safetensors, zstd streams, element types.

What frameworks put into them is the business of `ckptsync.layouts`.
"""
