"""How the ranks of a training learn of each other without a collective: each leaves a word in the store that torch's rendezvous made."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

_TRAININGS = itertools.count()  # every rank begins the same trainings in the same order


def agree(rank: int, world: int, word: str, about: str = "") -> Callable[[], tuple[str, ...] | None]:
    """Leave a word; what is returned gives the words of all ranks in their order, or ``None`` while one of them has not spoken.

    It never waits for a rank: once a gradient was reduced, every rank has begun, and so has spoken.  ``about``: the same on every rank
    (default: the n-th training).  Raises what torch raises if there is no process group, or its store is gone.
    """
    if world == 1:
        return lambda: (word,)
    about = about or str(next(_TRAININGS))
    keys = [f"ckptsync/{about}/{r}" for r in range(world)]
    store = _store()
    store.set(keys[rank], word)
    return lambda: _words(store, keys) if store.check(keys) else None


def first_word(word: str) -> str:
    """What the first rank to ask here said: the same on every rank, at once.  Raises what torch raises."""
    return bytes(_store().compare_set("ckptsync/first", "", word)).decode()


def _store() -> Any:
    from torch.distributed.distributed_c10d import _get_default_store  # noqa: PLC0415  # torch is the trainer's

    return _get_default_store()


def _words(store: Any, keys: Sequence[str]) -> tuple[str, ...]:
    found = store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]
    return tuple(bytes(word).decode() for word in found)
