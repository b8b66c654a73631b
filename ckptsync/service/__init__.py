"""The service that `ckptsync run` is: the roles worker, head and verifier in one process.

One loop in the main thread starts every piece of work as a task in a thread of its own. A task that
makes no progress ends the process, and systemd starts it again; every start continues from what is
in the store and on the disk.

In reading order: `run` is the main loop, from a configuration to an exit code. `tasks` has a task
and the watchdog. `worker_role` scans and uploads; `fs_events` and `directory_changes` say when to
scan. `head_roles` decides what is consolidated, verified and deleted, and `jobs` runs the commands
that do it in child processes. `process_control` handles signals, locks and systemd;
`store_connection` opens a store that may be unreachable. For people there are `process_status` (all
tasks of the process, and its heartbeat), `listeners` (/metrics, /healthz and the page), `monitor`
(the overview of a store and its alarms), `alert_channels` with its child process
`apprise_delivery`, and `log`.
"""
