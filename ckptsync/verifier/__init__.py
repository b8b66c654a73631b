"""Verification: read what was stored, compare it with what was recorded, and report the damage.

A damaged file often loads without an error, so only bytes that were read and match a recorded
digest count as verified. Four levels build on each other: stat, digest, parse, load.

In reading order: `verification` verifies a location, or a directory, level by level (`verify`,
`verify_location`); `write_reports` judges and writes. The levels: `expected_files` (stat,
baselines), `level_digest`, `level_parse`, `level_load`. `tracked_files` counts bytes and progress.
Level load asks a child process: `load_child` in a `sandbox`, which alone imports torch.
"""
