"""The roles under APScheduler and watchdog.

``service``: `run`, from a configuration to an exit code.  ``roles``: what each role's tick is; ``working``: all roles of a process;
``told`` and ``phases`` (pure): what their results say in the log.  ``tick``: the error boundary around one tick.  ``schedule``: when ticks
run, and how hints hasten them.  ``heart``: the heartbeat as a tick.  ``stopping``: signals; ``stoppable``: writes that end with them.  ``sdnotify``: what systemd is told;
``progress``: whether its watchdog is fed.  ``identity``: which process this is; ``lock``: one worker for an output directory.
``log``: one line an event.
"""
