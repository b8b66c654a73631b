"""``CkptSyncRayCallback``: compare the nodes of a Ray Train run, then give every worker the hook.

Ray starts workers on nodes that the user never sees: one without ckptsync, or with another clock,
shows itself hours later.  So the callback runs doctor's probe in every worker before the training
sets anything up, compares the answers, and lets each worker call `prepare`.

It uses Ray's DeveloperAPI, ``ray.train.v2._internal.execution.callback``.  Ray calls callbacks of
``RunConfig`` that are no ``UserCallback`` as its own (``data_parallel_trainer.py``), and those of
``RAY_TRAIN_CALLBACKS`` before its own. Ray's public ``UserCallback`` is not called before and after
training, so the versions are bounded: read and tried in Ray 2.51, 2.54 and 2.60.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayTaskError

from ckptsync.doctor.checks import compare
from ckptsync.errors import ConfigError
from ckptsync.hooks import autoload
from ckptsync.hooks.pin_checkpoint import COPY_THREAD
from ckptsync.stores.urls import Remote, located

_BEFORE = (2, 61)  # the first version of Ray whose internals nobody has read

try:
    if tuple(map(int, ray.__version__.split(".")[:2])) >= _BEFORE:
        raise ImportError("its internals have not been tried")  # noqa: TRY301
    from ray.train.v2._internal.constants import is_v2_enabled
    from ray.train.v2._internal.execution import callback as _callback
except ImportError as e:
    raise ConfigError(
        f"CkptSyncRayCallback: Ray {ray.__version__} is not supported: {e}",
        hint=(
            "install 'ray[train]>=2.51,<2.61', or name ckptsync.hooks.ray.setup_worker as"
            " worker_process_setup_hook"
        ),
    ) from e

_log = logging.getLogger("ckptsync.hook")
_LEVELS = ("fail", "warn", "off")
_ANSWER_WITHIN = 60.0  # seconds for a worker's facts: a driver, name service or mount may hang
_COPY_WITHIN = 300.0  # seconds
_FINISH_WITHIN = 3600.0  # seconds for all workers' `finish`, CKPTSYNC_WAIT included
_PASSED_ON = ("CKPTSYNC_WAIT", "CKPTSYNC_RUN")
_BASES = (_callback.WorkerGroupCallback, _callback.WorkerCallback)


class CkptSyncRayCallback(*_BASES):  # type: ignore[misc,unused-ignore]  # Ray need not be installed where this is checked
    """The callback of one run.

    ``store`` (or CKPTSYNC_STORE): a directory that every node sees, or a URL, to which each
    Trainer's hook starts an embedded worker; leave it out where workers are installed.  ``doctor``
    (or CKPTSYNC_DOCTOR): ``fail`` stops a run on incompatible nodes, ``warn`` only logs that,
    ``off`` does not look.  Raises ConfigError for another ``doctor``, and without Ray Train v2.
    """

    def __init__(self, store: str = "", doctor: str = "") -> None:
        """Read the options, and the environment; raise ConfigError as the class says."""
        self._variables = worker_variables(os.environ)
        store = store or os.environ.get("CKPTSYNC_STORE", "")
        if store:  # as the driver means it: workers have other working directories
            location = located(store)
            where = location.url if isinstance(location, Remote) else str(location)
            self._variables["CKPTSYNC_STORE"] = where
        self._doctor = doctor or os.environ.get("CKPTSYNC_DOCTOR", "") or "fail"
        if self._doctor not in _LEVELS:
            raise ConfigError(f"doctor={self._doctor!r}: not one of {', '.join(_LEVELS)}")
        self._has_ended = False
        if not is_v2_enabled():
            hint = (
                "RAY_TRAIN_V2_ENABLED=1 turns it on, as it is from Ray 2.51 on; or name"
                " ckptsync.hooks.ray.setup_worker as worker_process_setup_hook"
            )
            raise ConfigError(
                "CkptSyncRayCallback: a callback of Ray Train v2, which is turned off here",
                hint=hint,
            )

    def before_init_train_context(self, workers: Sequence[Any]) -> dict[str, list[Any]]:
        """Compare the nodes, on the controller, before Ray sets anything up.  Raises ConfigError.

        Ray's own callbacks come later: their process group would hang or fail where nodes do not
        fit together.
        """
        if self._doctor != "off":
            self._compare(list(_probe_nodes(workers)))
        return {}

    def after_init_train_context(self) -> None:
        """Give the Trainers of this worker the hook, and the driver's variables.

        Changes the process's environment.  Without a name of the Ray run it logs why, and goes on.
        """
        try:
            from ray import train  # noqa: PLC0415

            experiment = train.get_context().get_experiment_name()
        except Exception as e:  # noqa: BLE001  # training comes first: runs have their directories' names
            _log.warning("ckptsync: no name of the Ray run: %s: %s", type(e).__name__, e)
            experiment = ""
        prepare(self._variables, experiment)

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        """Remember whether every rank's training function has returned without an error."""
        self._has_ended = bool(worker_group_status.finished) and not worker_group_status.errors

    def before_worker_group_shutdown(self, worker_group: Any) -> None:
        """Finish the hooks' work after a good end: Ray's workers run no exit functions.

        Waits for all workers, an hour at most; logs errors and those that are late.
        """
        if not self._has_ended:
            return
        calls = worker_group.execute_async(finish)
        ready, late = ray.wait([*calls], num_returns=len(calls), timeout=_FINISH_WITHIN)
        errors = [f"not within {_FINISH_WITHIN:g} s" for _ in late]
        for call in ready:
            try:
                ray.get(call)
            except Exception as e:  # noqa: BLE001, PERF203  # any error: the training has ended well
                errors.append(f"{type(e).__name__}: {str(e)[:200]}")
        for error in errors:
            _log.warning("ckptsync: a Ray worker did not finish: %s", error)

    def _compare(self, facts: Sequence[Mapping[str, Any]]) -> None:
        """Log how the nodes differ, and which workers gave no facts.

        Raise ConfigError for incompatible ones with ``doctor`` ``fail``.
        """
        failures = []
        for finding in compare([node_facts for node_facts in facts if "error" not in node_facts]):
            text = f"{finding.where}: {finding.what} ({finding.why}; {finding.hint})"
            if finding.level == "fail":
                failures.append(text)
            else:
                _log.warning("ckptsync: %s", text)
        for node_facts in facts:
            if "error" in node_facts:
                _log.warning("ckptsync: a worker could not be examined: %s", node_facts["error"])
        if failures and self._doctor == "fail":
            hint = 'to train anyway: CkptSyncRayCallback(doctor="warn")'
            raise ConfigError(
                f"the nodes' environments are incompatible: {'; '.join(failures)}", hint=hint
            )
        if failures:
            _log.error("ckptsync: %s", "; ".join(failures))


def worker_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return CKPTSYNC_WAIT, CKPTSYNC_RUN and CKPTSYNC_LIMITS_…, if set; none holds a secret."""
    return {
        name: value
        for name, value in environment.items()
        if name in _PASSED_ON or name.startswith("CKPTSYNC_LIMITS_")
    }


def _probe_nodes(workers: Sequence[Any]) -> Iterator[Mapping[str, Any]]:
    """Yield each worker's facts, or an error for one that hangs; waits two minutes at most.

    Raises ConfigError if a worker cannot use ckptsync, and Ray's error for one that has died.
    """
    pending = {worker.execute_async(probe_node): worker for worker in workers}
    within = 2 * _ANSWER_WITHIN  # a worker gives up before
    ready, late = ray.wait([*pending], num_returns=len(pending), timeout=within)
    try:
        yield from ray.get(ready)
    except RayTaskError as e:
        why = str(e).strip().rpartition("\n")[2]
        raise ConfigError(
            f"a Ray worker cannot use ckptsync: {why}",
            hint="install the same version on every node",
        ) from e
    for call in late:
        yield {"error": f"{pending[call].metadata.hostname}: no answer within {within:g} s"}


# --- in the processes of Ray's workers; none of these functions raises


def prepare(variables: Mapping[str, str], experiment: str) -> None:
    """Give every Trainer of this process the hook, and the driver's variables: Ray does not.

    Changes the process's environment.  In the store, what a Trainer saves in ``out`` belongs to run
    ``<experiment>-out``, unless CKPTSYNC_RUN is set.
    """
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", experiment).lstrip("._-")[:60]
    if name:
        os.environ.setdefault("CKPTSYNC_RUN", f"{name}-{{dir}}")
    os.environ.update(variables)
    autoload.install()


def probe_node(within: float = _ANSWER_WITHIN) -> dict[str, Any]:
    """Return the facts of this machine that doctor compares; ``error`` if there are none in time.

    ``within``: seconds.
    """
    answers: list[dict[str, Any]] = []

    def probe() -> None:
        """Append this machine's facts, or an error, to the answers."""
        try:
            from ckptsync.doctor.probe import gather  # noqa: PLC0415

            answers.append(gather())
        except Exception as e:  # noqa: BLE001  # any error: the caller logs it
            answers.append({"error": f"{socket.gethostname()}: {type(e).__name__}: {e}"})

    probing = threading.Thread(target=probe, name="ckptsync-doctor", daemon=True)
    try:
        probing.start()
    except RuntimeError as e:
        return {"error": f"{socket.gethostname()}: {e}"}
    probing.join(within)
    late = {"error": f"{socket.gethostname()}: no answer within {within:g} s"}
    return answers[0] if answers else late


def finish() -> None:
    """Pin the final model, then wait for uploads as configured, and for copies of pinned files.

    Ray kills this process afterwards.  Waits at most `_COPY_WITHIN` seconds for each copying
    thread.  A process that has not imported `ckptsync.hooks.hf` waits for copies only.
    """
    hf = sys.modules.get("ckptsync.hooks.hf")
    if hf is not None:
        hf.finish()
    for thread in threading.enumerate():
        if thread.name == COPY_THREAD:
            thread.join(_COPY_WITHIN)
