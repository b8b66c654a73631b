"""The service that `ckptsync run` is: the roles worker, head and verifier at work in one process.

``run``: from a configuration to an exit code.  ``roles``: what is asked of all roles together; ``worker``: looks and sends; ``head``: consolidates,
verifies and retains by ``children``, each of which is a process (``child``).
``periodic``: work that is done again and again, what runs it, and when it is tried again; ``watchdog``: whether it gets on.
``process``: identity, signals, locks, systemd; ``store``: a store that may be away, and whose writes end with the process.
``heartbeat``: what others are told of this node; ``overview``: one look at everything; ``alerts``: who is told of alarms; ``metrics``: /metrics, /healthz.
``log``: one line an event.
"""
