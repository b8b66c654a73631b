"""The roles at work: monotonic loops for the worker, APScheduler for the head, hints from watchdog.

``service``: `run`, from a configuration to an exit code.  ``roles``: which roles there are; ``watching``: the worker's two ticks, a look and a send;
``heading``: the head's and the verifier's, whose ``errands`` are done by ``children``: each a process (``child``) that gets an order (``orders``), carries it out
(``bodies``), and is tried again when it is time (``waits``);
``working``: all roles of a process; ``told``, ``told_head`` and ``phases`` (pure): what their results say in the log.
``tick``: the error boundary around one tick.  ``loops`` and ``schedule``: when ticks run, and how hints hasten them; ``clocks``: a wall clock that jumps.
``heart``: the heartbeat and the facts as a tick, with ``rate``, ``disks`` and ``surveying``.  ``awaited``: a store that is not there yet; ``stoppable``: writes that end with the process.
``stopping``: signals; ``leaving``: it ends with another process.  ``sdnotify``: what systemd is told;
``progress``: whether its watchdog is fed.  ``identity``: which process this is; ``lock``: one worker for an output directory.
``log``: one line an event.
"""
