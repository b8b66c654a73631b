"""``worker_process_setup_hook``: what Ray calls in each of its worker processes when one begins, so nothing is imported here before it is used."""

from __future__ import annotations

import logging

_log = logging.getLogger("ckptsync.hook")


def setup_worker() -> None:
    """Let every Trainer of this process have the hook.  Never raises: Ray would not start the worker."""
    try:
        from ckptsync.hooks import autoload  # noqa: PLC0415

        autoload.install()
    except Exception as e:  # noqa: BLE001  # whatever it is: the training is not ours to stop
        _log.warning("ckptsync: no hook in this Ray worker: %s: %s", type(e).__name__, e)
