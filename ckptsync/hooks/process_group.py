"""The rank of this process, and values that ranks exchange in torch's rendezvous without waiting.

A hook may neither call a collective nor wait for another rank.  So each rank sets its own key in
the store that torch uses for its rendezvous, and checks later whether all keys are there.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ckptsync.errors import ConfigError

# rank and number of processes, as torchrun, DeepSpeed and accelerate, Open MPI, other MPIs and srun
# set them
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
_trainings = itertools.count()  # every rank begins the same trainings in the same order

Words = Callable[[], tuple[str, ...] | None]
"""Returns the words of all ranks in their order, or ``None`` while one is missing; never waits."""


@dataclass(frozen=True, slots=True)
class Rank:
    """The rank of this process; ``can_meet``: torch's process group, and so its store, is there."""

    rank: int
    world: int
    can_meet: bool


def this_rank(environment: Mapping[str, str] = os.environ) -> Rank:
    """Return the rank in torch's process group, else that of the launcher's variables.

    Raises ConfigError if those are no numbers.
    """
    group = getattr(sys.modules.get("torch"), "distributed", None)
    if group is not None and group.is_available() and group.is_initialized():
        return Rank(group.get_rank(), group.get_world_size(), can_meet=True)
    for rank, world in _LAUNCHERS:
        if world in environment:
            values = environment.get(rank, "0"), environment[world]
            if not all(map(str.isdecimal, values)):
                raise ConfigError(
                    f"{rank}={values[0]} {world}={values[1]}: not two numbers",
                    hint="the launcher of this process sets them",
                )
            return Rank(int(values[0]), int(values[1]), can_meet=False)
    return Rank(0, 1, can_meet=False)


def exchange(rank: int, world: int, word: str, about: str = "") -> Words:
    """Set this rank's value in torch's store; return a function that returns all ranks' values.

    That function returns None while one is missing.  Once a gradient was reduced, every rank has
    begun, and so has set its value.  ``about``: the same on every rank (default: the n-th
    training).  Raises what torch raises without a process group or store.
    """
    if world == 1:
        return lambda: (word,)
    about = about or str(next(_trainings))
    keys = [f"ckptsync/{about}/{r}" for r in range(world)]
    store = _store()
    store.set(keys[rank], word)

    def words() -> tuple[str, ...] | None:
        """Return the values of all ranks, or None while one is missing."""
        if not store.check(keys):
            return None
        values = (
            store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]
        )
        return tuple(bytes(word).decode() for word in values)

    return words


def first_word(word: str) -> str:
    """Return the value of the first rank that called this.  Raises what torch raises."""
    return bytes(_store().compare_set("ckptsync/first", "", word)).decode()


def _store() -> Any:
    """Return the store of torch's default process group.  Raises what torch raises without one."""
    from torch.distributed.distributed_c10d import _get_default_store  # noqa: PLC0415

    return _get_default_store()
