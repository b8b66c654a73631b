"""What is known of each tensor once its file is written, from its shares of the units in their order.  Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from ckptsync.merge.making import Made
from ckptsync.merge.plan import PlannedTensor
from ckptsync.merge.statistics import Statistics


@dataclass(frozen=True, slots=True)
class CopiedTensor:
    """``digest`` is empty, and ``statistics`` None, if not asked for; the latter also where the type has none.

    ``overflows``: how many finite values the cast made infinite.
    """

    name: str
    digest: str
    overflows: int
    statistics: Statistics | None


class Tally:
    """What is known of each tensor, from its shares in their order."""

    def __init__(self, tensors: Sequence[PlannedTensor], *, digests: bool) -> None:
        self._tensors, self._wants_digests = tensors, digests
        self._digesters: dict[int, Any] = {}  # of the tensor that is not whole yet
        self._digests: dict[int, str] = {}
        self._overflows: Counter[int] = Counter()
        self._statistics: dict[int, Statistics] = {}

    def add(self, made: Made) -> None:
        """Call with every unit, in order."""
        for number, data, overflows, found in made.looks:
            if overflows:
                self._overflows[number] += overflows
            if found is not None:
                self._statistics[number] = self._statistics.get(number, Statistics()) + found
            if self._wants_digests:
                self._digest(number, data)

    def tensors(self) -> Iterator[CopiedTensor]:
        """Each in its order, also those without elements."""
        self._close()
        empty = blake3().hexdigest() if self._wants_digests else ""
        for number, tensor in enumerate(self._tensors):
            yield CopiedTensor(tensor.name, self._digests.get(number, empty), self._overflows[number], self._statistics.get(number))

    def _digest(self, number: int, data: memoryview) -> None:
        if len(data) == self._tensors[number].size:
            self._digests[number] = blake3(data).hexdigest()
            return
        if number not in self._digesters:
            self._close()
            self._digesters = {number: blake3()}
        self._digesters[number].update(data)

    def _close(self) -> None:
        self._digests |= {number: digester.hexdigest() for number, digester in self._digesters.items()}
        self._digesters = {}
