"""Copying: a planned file as a stream of chunks, through a window whose size does not depend on the model.

Each unit is gathered and cast on its own, in parallel; digested, counted and written in order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass

from blake3 import blake3

from ckptsync.merge.making import Made, Making, placed, weight
from ckptsync.merge.pipeline import BUDGET, Steps, pipelined
from ckptsync.merge.plan import FilePlan
from ckptsync.merge.tally import CopiedTensor, Tally
from ckptsync.model import Files


@dataclass(frozen=True, slots=True)
class Work:
    """How a merge is done; what it writes does not depend on it.

    ``jobs``: how many threads work (1: none but the caller's), with ``window`` bytes in flight for each.  Each tensor's digest and statistics cost a look at every byte, and are there if
    asked for.
    """

    jobs: int = 1
    tensor_digests: bool = True
    statistics: bool = False
    window: int = BUDGET


@dataclass(frozen=True, slots=True)
class Copied:
    """What was written: the file's BLAKE3, and each tensor in its order."""

    digest: str
    tensors: tuple[CopiedTensor, ...]


class Copying:
    """One output file: `chunks` yields its bytes front to back, `result` says afterwards what they were.

    A chunk is valid until the next one is asked for.  All but the last begin and end at multiples of `ALIGN`, in the file and in memory.
    """

    def __init__(self, plan: FilePlan, files: Files, progress: Callable[[int], None], work: Work | None = None) -> None:
        self._plan, self._progress, self._work = plan, progress, work or Work()
        self._making = Making(plan, files, statistics=self._work.statistics)
        self._digester = blake3()
        self._tally = Tally(plan.tensors, digests=self._work.tensor_digests)

    def chunks(self) -> Generator[memoryview, None, None]:
        """The header, then every tensor.  Close it if it is not used to its end: threads may be at work."""
        steps = Steps(self._making.make, (self._digest, self._tally.add), self._making.release, weight)
        left = b""
        with contextlib.closing(pipelined(placed(self._plan), steps, self._work.jobs, self._work.window)) as made:
            for one in made:
                chunk, rest = one.chunk(left)
                left = bytes(rest)
                if chunk:
                    yield chunk
                if one.placed.unit.stored:
                    self._progress(one.placed.size)

    def result(self) -> Copied:
        """Call after the last chunk."""
        return Copied(self._digester.hexdigest(), tuple(self._tally.tensors()))

    def _digest(self, made: Made) -> None:
        self._digester.update(made.data)
