"""Agree on one checkpoint with the training's other nodes, and get it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ckptsync.pull.download import Progress
from ckptsync.resume.attempt import Attempt
from ckptsync.stores.contract import Store

ResumeTrust = Literal["verified", "complete"]


def _ignore(_text: str) -> None:
    """Say nothing."""


@dataclass(frozen=True, slots=True)
class PrepareOptions:
    """How a node prepares to begin.

    ``store``: opened; without it the output directory alone is judged.  ``url``: the store as
    messages name it.  ``wait``: seconds for the other nodes to say what they have, and again for
    them to get it.  ``keep_newer``: leave directories that are newer than the chosen checkpoint
    where they are.  ``require``: fail where there is nothing to begin with.  ``nodes``: whose
    files to pull, as `ckptsync pull --node` takes them; all files where it is empty.  ``say`` gets
    sentences for the log, ``progress`` the bytes of the download.
    """

    store: Store | None
    run: str
    url: str = ""
    trust: ResumeTrust = "verified"
    wait: float = 300.0
    keep_newer: bool = False
    require: bool = False
    nodes: tuple[str, ...] = ()
    say: Callable[[str], None] = _ignore
    progress: Progress | None = None


@dataclass(frozen=True, slots=True)
class Start:
    """What a training begins with.

    ``checkpoint`` and ``step`` are None where it begins from the beginning.  ``text`` is one
    sentence for the log: what was chosen, and why.
    """

    checkpoint: Path | None
    step: int | None
    text: str


def prepare(output_dir: Path, attempt: Attempt, options: PrepareOptions) -> Start:
    """Return the checkpoint that every node of an attempt begins with, once all nodes have it.

    The same attempt gives the same answer, on every node and however often it is called.

    Raises the same class of error on every node where one cannot begin: Incomplete where a node is
    late or there is nothing to begin with and ``require`` is set, ConfigError where nodes
    contradict each other, StoreError, Corrupt.
    """
    raise NotImplementedError
