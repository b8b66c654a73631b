"""The roles under APScheduler and watchdog.

``service``: `run`, from a configuration to an exit code.  ``roles``: what each role's tick is.  ``tick``: the error boundary
around one tick.  ``schedule``: when ticks run, and how hints hasten them.  ``stopping``: signals.  ``sdnotify``: what systemd is told.
``identity``: which process this is; ``lock``: one worker for an output directory.  ``log``: one line a change.
"""
