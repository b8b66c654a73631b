"""What lies in ``<output_dir>/_ckptsync``, shared by the worker and the training processes: pins, and what the hook says of a save.

``pins``: names of our own for a checkpoint's files.  ``links``: how they get there.  ``marks``: what training
processes and the worker tell each other in small files.  ``sweeping``: what the dead left half done.
Only the standard library is imported here: the hook runs in the trainer's own environment.
"""
