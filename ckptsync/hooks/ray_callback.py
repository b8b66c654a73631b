"""``CkptSyncRayCallback``: the hook on every worker of a Ray Train run, after a comparison of the nodes.

It uses Ray's DeveloperAPI, ``ray.train.v2._internal.execution.callback``.  Ray calls callbacks of ``RunConfig`` that are no
``UserCallback`` as its own (``data_parallel_trainer.py``), and those of ``RAY_TRAIN_CALLBACKS`` before its own.
Read and tried in Ray 2.60.
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

from ckptsync.doctor.checks import compare
from ckptsync.errors import ConfigError
from ckptsync.hooks import ray_worker
from ckptsync.stores.urls import Remote, located

_log = logging.getLogger("ckptsync.hook")
_LEVELS = ("fail", "warn", "off")
_FINISH_WITHIN = 3600.0  # seconds for all workers' `finish`, CKPTSYNC_WAIT included
_ANSWER_WITHIN = 2 * ray_worker.ANSWER_WITHIN  # seconds: a worker gives up before
_NAMES = ("ReplicaGroupCallback", "WorkerGroupCallback", "WorkerCallback")  # the first is not in every version
_BASES = tuple(getattr(_callback, name) for name in _NAMES if hasattr(_callback, name))


class CkptSyncRayCallback(*_BASES):  # type: ignore[misc,unused-ignore]  # Ray need not be installed where this is checked
    """The callback of one run.

    ``store`` (or CKPTSYNC_STORE): a directory that every node sees, or a URL; an embedded worker on each node sends
    to it.  Leave it out where workers are installed.  ``doctor`` (or CKPTSYNC_DOCTOR): ``fail`` stops a run on nodes
    that do not fit together, ``warn`` only logs that, ``off`` does not look.
    """

    def __init__(self, store: str = "", doctor: str = "") -> None:
        self._store = _absolute(store or os.environ.get("CKPTSYNC_STORE", ""))
        self._variables = worker_variables(os.environ) | ({"CKPTSYNC_STORE": self._store} if self._store else {})
        self._doctor = doctor or os.environ.get("CKPTSYNC_DOCTOR", "") or "fail"
        if self._doctor not in _LEVELS:
            raise ConfigError(f"doctor={self._doctor!r}: not one of {', '.join(_LEVELS)}")
        self._has_ended = False
        if not is_v2_enabled():
            hint = "RAY_TRAIN_V2_ENABLED=1 turns it on, as it is from Ray 2.51 on; or name ckptsync.hooks.ray.setup_worker as worker_process_setup_hook"
            raise ConfigError("CkptSyncRayCallback: a callback of Ray Train v2, which is turned off here", hint=hint)

    def before_init_train_context(self, workers: Sequence[Any]) -> dict[str, list[Any]]:
        """Compare the nodes, on the controller, before Ray sets anything up.  Raises ConfigError.

        Ray's own callbacks come later: their process group would hang or fail where nodes do not fit together.
        """
        if self._doctor != "off":
            self._compare(list(_probe_nodes(workers)))
        return {}

    def after_init_train_context(self) -> None:
        """Give the Trainers of this worker the hook."""
        ray_worker.prepare(self._variables)

    def after_worker_group_start(self, worker_group: Any) -> None:
        """Start an embedded worker on each node, before the training function."""
        self._has_ended = False
        self._serve(worker_group)

    def after_replica_group_start(self, replica_group: Any) -> None:
        """Start them where Ray replaced some workers and the others train on (torchft)."""
        self._serve(replica_group)

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        """Note whether every rank's training function has returned."""
        self._has_ended = bool(worker_group_status.finished) and not worker_group_status.errors

    def before_worker_group_shutdown(self, worker_group: Any) -> None:
        """Finish the hooks' work where the training has ended well: Ray's workers run no exit functions."""
        if self._has_ended:
            for error in _errors(worker_group.execute_async(ray_worker.finish)):
                _log.warning("ckptsync: a Ray worker did not finish: %s", error)

    def _serve(self, group: Any) -> None:
        if self._store:
            for error in filter(None, group.execute(ray_worker.serve, self._store)):
                _log.warning("ckptsync: no embedded worker: %s", error)

    def _compare(self, facts: Sequence[Mapping[str, Any]]) -> None:
        failures = []
        for finding in compare([one for one in facts if "error" not in one]):
            text = f"{finding.where}: {finding.what} ({finding.why}; {finding.hint})"
            if finding.level == "fail":
                failures.append(text)
            else:
                _log.warning("ckptsync: %s", text)
        for one in facts:
            if "error" in one:
                _log.warning("ckptsync: a worker could not be examined: %s", one["error"])
        if failures and self._doctor == "fail":
            hint = 'CkptSyncRayCallback(doctor="warn") trains all the same'
            raise ConfigError(f"the nodes do not fit together: {'; '.join(failures)}", hint=hint)
        if failures:
            _log.error("ckptsync: %s", "; ".join(failures))


def worker_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the driver's variables for hooks and embedded workers; none holds a key."""
    names = ("CKPTSYNC_WAIT", "CKPTSYNC_RUN")
    return {name: value for name, value in environment.items() if name in names or name.startswith("CKPTSYNC_LIMITS_")}


def _absolute(store: str) -> str:
    """Return the store as the driver means it: workers have other working directories.  Raises ConfigError."""
    location = located(store) if store else ""
    return location.url if isinstance(location, Remote) else str(location)


def _probe_nodes(workers: Sequence[Any]) -> Iterator[Mapping[str, Any]]:
    """Yield each worker's facts, an error for one that hangs.  Raises ConfigError, and Ray's error for one that has died."""
    pending = {worker.execute_async(ray_worker.probe_node): worker for worker in workers}
    ready, late = ray.wait([*pending], num_returns=len(pending), timeout=_ANSWER_WITHIN)
    try:
        yield from ray.get(ready)
    except RayTaskError as e:
        why = str(e).strip().rpartition("\n")[2]
        raise ConfigError(f"a Ray worker cannot use ckptsync: {why}", hint="install the same version on every node") from e
    for ref in late:
        yield {"error": f"{pending[ref].metadata.hostname}: no answer within {_ANSWER_WITHIN:g} s"}


def _errors(pending: Sequence[Any]) -> Iterator[str]:
    """Yield the errors of these calls, once all have ended, or after an hour.

    What a dead worker kept lies on its node, and the worker there judges it.
    """
    ready, late = ray.wait([*pending], num_returns=len(pending), timeout=_FINISH_WITHIN)
    yield from (f"not within {_FINISH_WITHIN:g} s" for _ in late)
    for ref in ready:
        try:
            ray.get(ref)
        except Exception as e:  # noqa: BLE001, PERF203  # any error: the training has ended well
            yield f"{type(e).__name__}: {str(e)[:200]}"
