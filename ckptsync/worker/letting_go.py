"""Letting go of pins, and of local checkpoints, that nobody needs any more: the store has their files, VERIFIED."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Sequence

from ckptsync.errors import CkptsyncError, StoreError
from ckptsync.spool import pins as spool
from ckptsync.spool.sweeping import tidy
from ckptsync.worker.cleaning import clean
from ckptsync.worker.looking import Seen
from ckptsync.worker.lookout import Lookout
from ckptsync.worker.options import RunDir, WorkerOptions
from ckptsync.worker.pinning import spare
from ckptsync.worker.remembering import forget, remember
from ckptsync.worker.result import Failure, Progress, failure
from ckptsync.worker.store_view import StoreView


class Letting:
    """What may go from this node, by what is known of the store."""

    def __init__(self, options: WorkerOptions, view: StoreView, lookout: Lookout) -> None:
        self._options, self._view, self._lookout = options, view, lookout

    def go(self, run: RunDir, here: Collection[str]) -> tuple[list[Progress], list[Failure]]:
        """After each sending: what went, as far as people should see it, and what could not.

        ``here``: checkpoints that the look before saw, and that it could not look at; with the empty name it saw none.
        """
        seen = [w.seen for w in self._lookout.watched() if w.seen.run == run.name]
        told: list[Progress] = []
        wrong: list[Failure] = []
        try:
            tidy(run.path, time.time())
            if "" not in here:
                forget(run.path, {*here, *(s.spot.name for s in seen)})
            self._spare(run, seen)
            if self._options.clean == "verified":
                self._clean(run, told, wrong)
        except CkptsyncError as e:
            wrong.append(failure(run.name, "", e))
        return told, wrong

    def _clean(self, run: RunDir, told: list[Progress], wrong: list[Failure]) -> None:
        watched = [w for w in self._lookout.watched() if w.seen.run == run.name]
        for name, found in clean(run, watched, self._view, self._lookout, self._options.keep_local):
            if isinstance(found, CkptsyncError):
                wrong.append(failure(run.name, name, found))
            else:
                told.append(Progress(run.name, name, 0, "cleaned", "the store has it, VERIFIED", files=0, size=found))

    def _spare(self, run: RunDir, seen: Sequence[Seen]) -> None:
        here = {s.spot.name for s in seen if not s.hold.gone}
        ours = [s for s in seen if s.pin is not None and s.pin.node == self._options.node]
        proven = [s.pin for s in ours if s.pin and self._view.is_proven(run.name, s.spot.name, s.hold.stats)]
        for pin in spare(proven, self._options.keep_pins):
            if pin.checkpoint in here:
                with contextlib.suppress(StoreError):  # a full spool: the pin's room is worth more than what would be kept
                    remember(run.path, pin)
            spool.drop(pin, self._lookout.lock)
