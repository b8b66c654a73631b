"""Saying in the store that this node is sending a checkpoint.

What it has written and not yet named in a manifest would be litter to every other node.  Whoever finds a name taken by other bytes, and nobody who
says so, may write over it: so this is said before the first file is created, and taken back only when the manifest is there.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from ckptsync.errors import StoreError
from ckptsync.records.names import sending_prefix
from ckptsync.stores.contract import About, Store
from ckptsync.worker.take import Passed

EVERY = 60.0
_YES, _NO = b"sending\n", b""


@contextlib.contextmanager
def announced(store: Store, node: str, run: str, checkpoint: str, passed: Passed) -> Iterator[Passed]:
    """As long as this lasts, others know.  Gives what has to be told of the bytes that pass, instead of ``passed``: it says so again."""
    word = _Word(store, sending_prefix(run, checkpoint) + node)
    word.say(_YES)

    def pulse(count: int) -> None:
        if time.monotonic() - word.said > EVERY:
            word.say(_YES)
        passed(count)

    try:
        yield pulse
    finally:
        with contextlib.suppress(StoreError):  # the others will wait in vain for a while, and that is all
            word.say(_NO)


class _Word:
    """``said``: when, on our clock."""

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name, self.said = store, name, 0.0

    def say(self, content: bytes) -> None:
        self._store.write(self._name, [content], About(len(content)))
        self.said = time.monotonic()
