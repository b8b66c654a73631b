"""Download a checkpoint or a consolidated model, so that a training can resume from it.

``find`` and ``choose``: which one.  ``download_plan``: which files.  ``download``: into a hidden
directory, which is renamed at the end.  ``logs``: those of a run.
"""
