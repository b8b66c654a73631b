"""Verification: four levels (stat, digest, parse, load), and reports.

Read in this order: ``verification`` verifies a location, or a directory, level by level;
``write_reports`` judges and writes.  The levels: ``expected_files`` (stat, baselines),
``level_digest``, ``level_parse``, ``level_load``.  ``tracked_files`` counts bytes
and progress.  Level load asks a child process: ``load_child`` in a ``sandbox``, which alone
imports torch.
"""
