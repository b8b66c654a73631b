"""``CkptSyncRayCallback``: the hook on every worker of a Ray Train run, and the nodes compared before it trains.

It is of Ray's DeveloperAPI, ``ray.train.v2._internal.execution.callback``: callbacks of ``RunConfig`` that are no ``UserCallback`` are called as Ray's own are
(``data_parallel_trainer.py``), and those of ``RAY_TRAIN_CALLBACKS`` before Ray's own.  Read and seen in Ray 2.60.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.train.v2._internal.constants import is_v2_enabled
from ray.train.v2._internal.execution.callback import WorkerCallback, WorkerGroupCallback

from ckptsync.errors import ConfigError
from ckptsync.hooks import ray_worker
from ckptsync.hooks.ray_doctor import LEVELS, Examined, examine

_log = logging.getLogger("ckptsync.hook")
_LEAVING = 3600.0  # seconds that workers may take to finish what they keep, at the end; CKPTSYNC_WAIT is among them


class CkptSyncRayCallback(WorkerGroupCallback, WorkerCallback):  # type: ignore[misc,unused-ignore]  # Ray need not be installed where this is checked
    """One for each run.

    ``store`` (or CKPTSYNC_STORE): a directory that every node sees, or a URL, to which an embedded worker on each node sends; none where workers are
    installed.  ``doctor`` (or CKPTSYNC_DOCTOR): ``fail`` lets no training begin on nodes that a failure was found of, ``warn`` says what was found, ``off`` asks nothing.
    """

    def __init__(self, store: str = "", doctor: str = "") -> None:
        self._store = _absolute(store or os.environ.get("CKPTSYNC_STORE", ""))
        self._told = told_to_workers(os.environ) | ({"CKPTSYNC_STORE": self._store} if self._store else {})
        self._doctor = doctor or os.environ.get("CKPTSYNC_DOCTOR", "") or "fail"
        if self._doctor not in LEVELS:
            raise ConfigError(f"doctor={self._doctor!r}: one of {', '.join(LEVELS)} is wanted")
        self._has_ended = False
        if not is_v2_enabled():
            raise ConfigError(
                "CkptSyncRayCallback: a callback of Ray Train v2, which is turned off here", hint="unset RAY_TRAIN_V2_ENABLED"
            )

    def after_init_train_context(self) -> None:
        """On each worker: the hook."""
        ray_worker.prepare(self._told)

    def after_worker_group_start(self, worker_group: Any) -> None:
        """On the controller, before the training function: compare the nodes, and start an embedded worker on each.  Raises ConfigError."""
        self._has_ended = False
        if self._doctor != "off":
            self._judge(examine(worker_group.execute(ray_worker.tell_facts)))
        if self._store:
            for trouble in filter(None, worker_group.execute(ray_worker.serve, self._store)):
                _log.warning("ckptsync: no embedded worker: %s", trouble)

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        """Whether every rank's training function has returned."""
        self._has_ended = bool(worker_group_status.finished) and not worker_group_status.errors

    def before_worker_group_shutdown(self, worker_group: Any) -> None:
        """Ray ends its workers without their exit functions; where the training has ended well, what these would do is done now."""
        if self._has_ended:
            _unharmed(lambda: ray.get(worker_group.execute_async(ray_worker.leave), timeout=_LEAVING))

    def _judge(self, found: Examined) -> None:
        for text in found.warnings:
            _log.warning("ckptsync: %s", text)
        if not found.failures:
            return
        text = "; ".join(found.failures)
        if self._doctor == "fail":
            raise ConfigError(
                f"the nodes do not fit together: {text}", hint='CkptSyncRayCallback(doctor="warn") trains all the same'
            )
        _log.error("ckptsync: %s", text)


def told_to_workers(environment: Mapping[str, str]) -> dict[str, str]:
    """What the driver's environment says to the hook and to embedded workers; nothing that holds a key."""
    return {name: value for name, value in environment.items() if name == "CKPTSYNC_WAIT" or name.startswith("CKPTSYNC_LIMITS_")}


def _absolute(store: str) -> str:
    """As the driver means it: workers have other working directories."""
    return store if not store or "://" in store else str(Path(store).absolute())


def _unharmed(do: Callable[[], object]) -> None:
    try:
        do()
    except Exception as e:  # noqa: BLE001  # a worker may be dead; what it kept lies on its node, and the worker there judges it
        _log.warning("ckptsync: a Ray worker did not say good-bye: %s: %s", type(e).__name__, str(e)[:200])
