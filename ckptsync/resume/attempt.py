"""Read which attempt of a training this is, and how many nodes take part in it.

All nodes of one start must use the same name, and each start another one.  Schedulers and launchers
tell both in environment variables; where they do not, the user must name the attempt.  Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ckptsync.digest import digest
from ckptsync.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_MOST_NODES = 100_000
# the number of nodes; a launcher's come first, since a scheduler's job may have more nodes
_COUNTS = (
    "NNODES",
    "MAX_NNODES",
    "PET_NNODES",
    "GROUP_WORLD_SIZE",
    "SLURM_STEP_NUM_NODES",
    "SLURM_NNODES",
    "SKYPILOT_NUM_NODES",
)
# the number of this node: above 0 shows that there are several nodes
_NODE_RANKS = (
    "NODE_RANK",
    "PET_NODE_RANK",
    "GROUP_RANK",
    "SLURM_NODEID",
    "SKYPILOT_NODE_RANK",
    "JOB_COMPLETION_INDEX",
    "OMPI_COMM_WORLD_RANK",
)
# the number of processes on one node, each of which would call `resume`
_PER_NODE = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
_NO_NAME = (
    "name each start of the training alike on all of its nodes, and otherwise each time:"
    " --attempt NAME"
)
# hints: how to name an attempt where a variable is set that does not name it
_NAMING = {
    "TORCHELASTIC_RUN_ID": "call it in front of torchrun, which counts a restart on one node only;"
    " each start needs a name of its own, the same on all nodes: --attempt NAME",
    "SKYPILOT_TASK_ID": "the task's id stays after a recovery, the nodes' addresses do not:"
    ' --attempt "$(echo "$SKYPILOT_TASK_ID $SKYPILOT_NODE_IPS" | sha256sum | cut -c 1-16)"',
    "RAY_JOB_ID": "the job's id stays where Ray tries a task again: have the driver make a name for"
    " each try, --attempt NAME",
    "KUBERNETES_SERVICE_HOST": "the Job's UID names it, if each restart makes another Job;"
    " `ckptsync config example kubernetes/train` shows how: --attempt=$(JOB_UID)",
}
_NO_COUNT = "say how many nodes train together: --nnodes N"
_ONCE = "call `ckptsync resume` once on each node, in front of the launcher (torchrun, srun -n1)"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of a training on all of its nodes.

    ``name`` is the same on all nodes of one start, and another for each start; ``node`` is the id
    of this node, as the worker's.
    """

    name: str
    nnodes: int
    node: str


def read_attempt(
    environment: Mapping[str, str],
    node: str,
    unique_name: str,
    *,
    name: str | None = None,
    nnodes: int | None = None,
) -> Attempt:
    """Return the attempt that the options name, else the variables of a launcher or scheduler.

    Args:
        environment: the variables of this process.
        node: the id of this node.
        unique_name: the name of an attempt on one node that no variable names; nobody else uses it.
        name: the value of ``--attempt``.
        nnodes: the value of ``--nnodes``.

    Raises:
        ConfigError: if ``name`` or the number of nodes is not valid or not known, if several nodes
            are expected and nothing names the attempt, or if several processes of this node would
            each call `resume`.

    """
    _check_once(environment)
    count = _count(environment) if nnodes is None else nnodes
    if not 0 < count <= _MOST_NODES:
        raise ConfigError(f"--nnodes {count}: not a number of nodes", hint=_NO_COUNT)
    if name is not None:
        if not _NAME.fullmatch(name):
            why = "letters, digits, '_', '.' and '-', at most 100, a letter or digit first"
            raise ConfigError(f"--attempt {name!r}: not an attempt's name", hint=f"use {why}")
        return Attempt(name, count, node)
    scheduler_name = next(filter(None, (name_from(environment) for name_from in _NAMES)), "")
    if not scheduler_name and count > 1:
        raise ConfigError(
            f"{count} nodes train together, and no variable of a scheduler names this attempt",
            hint=next((hint for name, hint in _NAMING.items() if name in environment), _NO_NAME),
        )
    return Attempt(_plain(scheduler_name) if scheduler_name else unique_name, count, node)


def next_try(attempt: Attempt, number: int) -> Attempt:
    """Return the attempt of a restart; ``number`` is 1 for the first restart."""
    return replace(attempt, name=f"{attempt.name}.{number}")


def _check_once(environment: Mapping[str, str]) -> None:
    """Raise ConfigError if variables show several processes on one node that would each choose.

    A variable of `_PER_NODE` is above 1, or a Slurm step has more tasks than nodes.
    """
    for variable in _PER_NODE:
        if (_number(environment, variable) or 0) > 1:
            processes = f"{environment[variable]} processes of this node"
            raise ConfigError(f"{variable}: {processes} would each choose a checkpoint", hint=_ONCE)
    tasks, nodes = (
        _number(environment, f"SLURM_STEP_NUM_{kind}") or 0 for kind in ("TASKS", "NODES")
    )
    if tasks > nodes > 0:
        processes = f"srun has started {tasks} tasks on {nodes} nodes"
        raise ConfigError(
            f"{processes}, and each would choose a checkpoint", hint="srun --ntasks-per-node=1"
        )


def _count(environment: Mapping[str, str]) -> int:
    """Return the number of nodes, by the first of `_COUNTS` that is set, else Open MPI's, else 1.

    Raise ConfigError for an elastic launch (``1:4``), for what is no number, and if 1 is
    contradicted.
    """
    for variable in _COUNTS:
        text = environment.get(variable, "").strip()
        if not text:
            continue
        least, _, most = text.rpartition(":")  # 1:4 where the launch is elastic
        least = environment.get("MIN_NNODES", "") if variable == "MAX_NNODES" else least
        if not (most.isascii() and most.isdecimal() and len(most) < 9):
            raise ConfigError(f"{variable}={text!r:.80}: not a number of nodes", hint=_NO_COUNT)
        if least not in ("", most):
            raise ConfigError(f"{variable}={text}: {least} to {most} nodes", hint=_NO_COUNT)
        count = int(most)
        break
    else:
        count = _number(environment, "OMPI_COMM_WORLD_SIZE") or 1  # one process a node
    if count == 1:
        _check_alone(environment)
    return count


def _check_alone(environment: Mapping[str, str]) -> None:
    """Raise ConfigError if a variable shows that there may be more nodes than this one.

    A node's number is above 0, or JOB_COMPLETION_INDEX is set and no number of nodes.
    """
    for variable in _NODE_RANKS:
        number = _number(environment, variable)
        if number and number > 0:
            raise ConfigError(
                f"{variable}={number}: not the only node, and no variable says how many there are",
                hint=_NO_COUNT,
            )
    if "JOB_COMPLETION_INDEX" in environment and not any(map(environment.get, _COUNTS)):
        raise ConfigError(
            "JOB_COMPLETION_INDEX: one pod of a job, and no variable says how many there are",
            hint=_NO_COUNT,
        )


def _number(environment: Mapping[str, str], variable: str) -> int | None:
    """Return the whole number in a variable; None if it is not set, or is no number."""
    text = environment.get(variable, "").strip()
    is_number = text.isascii() and text.isdecimal() and len(text) < 9
    return int(text) if is_number else None


def _of_mpi(environment: Mapping[str, str]) -> str:
    """Return the name of one `mpirun`, empty outside of one.

    It comes before Slurm's variables, which only some nodes of an `mpirun` see.
    """
    return environment.get("PMIX_NAMESPACE", "") if "OMPI_COMM_WORLD_SIZE" in environment else ""


def _of_slurm(environment: Mapping[str, str]) -> str:
    """Return the Slurm job, its restarts and its step as one name; empty outside of Slurm.

    Each array task has its own SLURM_JOB_ID, each `srun` is a step, and a requeued job keeps its
    id.
    """
    job = environment.get("SLURM_JOB_ID", "")
    restart = environment.get("SLURM_RESTART_COUNT") or "0"
    step = environment.get("SLURM_STEP_ID", "")
    return f"slurm-{job}.{restart}{f'.{step}' if step else ''}" if job else ""


_NAMES: tuple[Callable[[Mapping[str, str]], str], ...] = (_of_mpi, _of_slurm)


def _plain(name: str) -> str:
    """Return a name that is one component of a store's names; any other name gets a digest."""
    if _NAME.fullmatch(name):
        return name
    return f"a-{re.sub(r'[^A-Za-z0-9_.-]', '-', name)[:60]}.{digest(name.encode())[:8]}"
