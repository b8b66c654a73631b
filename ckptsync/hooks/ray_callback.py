"""``CkptSyncRayCallback``: the hook on every worker of a Ray Train run, and the nodes compared before it trains.

It is of Ray's DeveloperAPI, ``ray.train.v2._internal.execution.callback``: callbacks of ``RunConfig`` that are no ``UserCallback`` are called as Ray's own are
(``data_parallel_trainer.py``), and those of ``RAY_TRAIN_CALLBACKS`` before Ray's own.  Read and seen in Ray 2.60.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayTaskError
from ray.train.v2._internal.constants import is_v2_enabled
from ray.train.v2._internal.execution import callback as _callback

from ckptsync.errors import ConfigError
from ckptsync.hooks import ray_worker
from ckptsync.hooks.ray_doctor import LEVELS, Examined, examine
from ckptsync.stores.urls import Remote, located

_log = logging.getLogger("ckptsync.hook")
_LEAVING = 3600.0  # seconds that workers may take to finish what they keep, at the end; CKPTSYNC_WAIT is among them
_TELLING = 2 * ray_worker.TELLING  # seconds: a worker gives up before
_NAMES = ("ReplicaGroupCallback", "WorkerGroupCallback", "WorkerCallback")  # the first is not in every version
_BASES = tuple(getattr(_callback, name) for name in _NAMES if hasattr(_callback, name))


class CkptSyncRayCallback(*_BASES):  # type: ignore[misc,unused-ignore]  # Ray need not be installed where this is checked
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
            hint = "RAY_TRAIN_V2_ENABLED=1 turns it on, as it is from Ray 2.51 on; or name ckptsync.hooks.ray.setup_worker as worker_process_setup_hook"
            raise ConfigError("CkptSyncRayCallback: a callback of Ray Train v2, which is turned off here", hint=hint)

    def before_init_train_context(self, workers: Sequence[Any]) -> dict[str, list[Any]]:
        """On the controller, before Ray sets anything up: compare the nodes.  Raises ConfigError.

        Callbacks of ``RunConfig`` come after Ray's own, whose process group would hang, or fail, where nodes do not fit together.
        """
        if self._doctor != "off":
            self._judge(examine(_told_by(workers)))
        return {}

    def after_init_train_context(self) -> None:
        """On each worker: the hook."""
        ray_worker.prepare(self._told)

    def after_worker_group_start(self, worker_group: Any) -> None:
        """On the controller, before the training function: an embedded worker on each node."""
        self._has_ended = False
        self._serve(worker_group)

    def after_replica_group_start(self, replica_group: Any) -> None:
        """The same where Ray has replaced some workers and the others train on (torchft): what ended with the old ones' processes goes on with the new."""
        self._serve(replica_group)

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        """Whether every rank's training function has returned."""
        self._has_ended = bool(worker_group_status.finished) and not worker_group_status.errors

    def before_worker_group_shutdown(self, worker_group: Any) -> None:
        """Ray ends its workers without their exit functions; where the training has ended well, what these would do is done now."""
        if self._has_ended:
            for trouble in _troubles(worker_group.execute_async(ray_worker.leave)):
                _log.warning("ckptsync: a Ray worker did not say good-bye: %s", trouble)

    def _serve(self, group: Any) -> None:
        if self._store:
            for trouble in filter(None, group.execute(ray_worker.serve, self._store)):
                _log.warning("ckptsync: no embedded worker: %s", trouble)

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
    told = ("CKPTSYNC_WAIT", "CKPTSYNC_RUN")
    return {name: value for name, value in environment.items() if name in told or name.startswith("CKPTSYNC_LIMITS_")}


def _absolute(store: str) -> str:
    """As the driver means it: workers have other working directories.  Raises ConfigError for what names no store."""
    location = located(store) if store else ""
    return location.url if isinstance(location, Remote) else str(location)


def _told_by(workers: Sequence[Any]) -> Iterator[Mapping[str, Any]]:
    """What each told of itself; of one that hangs, that it does.  Raises ConfigError, and Ray's own error for one that has died."""
    asked = {worker.execute_async(ray_worker.tell_facts): worker for worker in workers}
    ready, late = ray.wait([*asked], num_returns=len(asked), timeout=_TELLING)
    try:
        yield from ray.get(ready)
    except RayTaskError as e:
        why = str(e).strip().rpartition("\n")[2]
        raise ConfigError(f"a Ray worker cannot use ckptsync: {why}", hint="install the same version on every node") from e
    for ref in late:
        yield {"error": f"{asked[ref].metadata.hostname}: no answer within {_TELLING:g} s"}


def _troubles(asked: Sequence[Any]) -> Iterator[str]:
    """Why some did not do it, once all have, or for an hour.  What a worker that is dead kept lies on its node, and the worker there judges it."""
    ready, late = ray.wait([*asked], num_returns=len(asked), timeout=_LEAVING)
    yield from (f"not within {_LEAVING:g} s" for _ in late)
    for ref in ready:
        try:
            ray.get(ref)
        except Exception as e:  # noqa: BLE001, PERF203  # whatever it is, the training has ended well
            yield f"{type(e).__name__}: {str(e)[:200]}"
