"""Shares pins and markers between the worker and the training processes of one output directory.

The problem: rotation deletes a checkpoint before the worker has uploaded it, and several processes
that may be killed at any moment need the same files.  The idea: everything lies as plain files in
``<output_dir>/_ckptsync`` (the spool), appears by one rename, and may be deleted without harm.

In order: `safe_files` opens, writes and removes files of the spool without following links; `pins`
creates, changes and deletes the hard links that keep a checkpoint's files; `markers` reads and
writes the small JSON files of training processes.  Only the standard library is imported: the hook
runs in the trainer's own environment.
"""
