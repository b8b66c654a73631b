"""The rank of this process, and the words that ranks leave for each other in torch's rendezvous.

No rank calls a collective or waits for another: a rank sets its own key, and looks whether all keys
are there.
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
    """The rank of this process; ``can_meet``: torch's process group is there, with its store."""

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
    """Leave this rank's word in torch's store; return a function that gives all ranks' words.

    Once a gradient was reduced, every rank has begun, and so has left its word.  ``about``: the
    same on every rank (default: the n-th training).  Raises what torch raises if there is no
    process group, or its store is gone.
    """
    if world == 1:
        return lambda: (word,)
    about = about or str(next(_trainings))
    keys = [f"ckptsync/{about}/{r}" for r in range(world)]
    store = _store()
    store.set(keys[rank], word)

    def words() -> tuple[str, ...] | None:
        if not store.check(keys):
            return None
        found = (
            store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]
        )
        return tuple(bytes(word).decode() for word in found)

    return words


def first_word(word: str) -> str:
    """Return the word of the first rank that called this.  Raises what torch raises."""
    return bytes(_store().compare_set("ckptsync/first", "", word)).decode()


def _store() -> Any:
    # torch is the trainer's
    from torch.distributed.distributed_c10d import _get_default_store  # noqa: PLC0415

    return _get_default_store()
