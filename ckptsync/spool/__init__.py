"""What lies in ``<output_dir>/_ckptsync``, shared by the worker and the training processes.

``safe_files``: safe access to it.  ``pins``: names of our own for a checkpoint's files, how they
get there, and the cleanup of what killed processes left half done.  ``markers``: small files that
training processes and the worker write for each other. Only the standard library is imported here:
the hook runs in the trainer's own environment.
"""
