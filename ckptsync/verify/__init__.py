"""Verification: five levels (stat, digest, parse, load, model), and reports.

Read in this order: ``verification`` verifies a location, or a directory, level by level;
``write_reports`` judges and writes.  The levels: ``expected_files`` (stat, baselines),
``level_digest``, ``level_parse``, ``level_load`` (load and model).  ``tracked_files`` counts bytes
and progress.  Load and model ask child processes through ``loader_process``: ``load_child`` and
``model_child``, both in a ``sandbox``; they alone import torch.
"""
