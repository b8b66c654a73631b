"""The service that `ckptsync run` is: the roles worker, head and verifier in one process.

``run``: the main loop, from a configuration to an exit code.  ``tasks``: work that is done again
and again, and the watchdog.  ``worker_role`` scans and uploads; ``fs_events`` and
``directory_changes`` say when to scan; ``head_roles`` decides what is consolidated, verified and
retained, and ``jobs`` runs the commands that do it in child processes.  ``process_control``:
signals, locks, systemd.  ``store_connection``: a store that may be away.  For people:
``process_status`` (all tasks of the process, and its heartbeat), ``listeners`` (/metrics, /healthz
and the page), ``monitor`` (the overview of a store), ``alert_channels`` and its child
``apprise_delivery``, ``log``.
"""
