"""What a configuration says, as frozen values.  Durations are seconds, sizes are bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ckptsync.merge.plan import DType
from ckptsync.records.report import Level
from ckptsync.stores.timetable import Timetable

Role = Literal["worker", "head", "verifier"]
ROLES: tuple[Role, ...] = ("worker", "head", "verifier")


@dataclass(frozen=True, slots=True)
class RunConfig:
    """A training job's output directory, or a glob of them; ``name`` is empty where the directory's own name serves."""

    path: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Where checkpoints are gathered; ``options`` are its client's, as fsspec calls them.  They may hold keys, so nothing prints them."""

    url: str
    options: Mapping[str, object] = field(repr=False)


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """What transfers may take: see `ckptsync.stores.limits.Limits`."""

    bandwidth: Timetable | None
    threads: int
    memory: int
    patience: float
    stall: float


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """When a checkpoint counts as settled, how often to look, what to send and in which order, what to keep on this node.

    ``superseded``: whether an older save that a newer one overtook is still sent (``keep``) or given up (``drop``).  ``include`` and ``exclude``: globs of
    files in a checkpoint, after ``send``.  ``spool_budget`` in bytes, 0 where the free space decides; ``spool_full`` is
    ``oldest``, ``wait`` or ``every:N``.  ``keep_local``: the newest checkpoints that cleaning leaves, at least one.
    """

    runs: tuple[RunConfig, ...]
    quiet: float
    unmarked: float
    scan_every: float
    keep_pins: int
    order: Literal["oldest", "newest"]
    superseded: Literal["keep", "drop"]
    send: Literal["all", "no-optimizer", "weights"]
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    spool_budget: int
    spool_full: str
    clean: Literal["off", "verified"]
    keep_local: int


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """How often to consolidate, and how; ``config_from`` maps a run (or ``*``) to where config and tokenizer lie."""

    every: float
    dtype: DType
    max_shard_size: int
    config_from: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class VerifyConfig:
    """``level`` and how often each place is verified again; ``tick`` is how often to look what is due."""

    level: Level
    every: float
    tick: float


@dataclass(frozen=True, slots=True)
class LogConfig:
    """``level`` is one of logging's, in lower case; ``format`` is ``text``, ``json`` or ``auto``: text on a terminal, else JSON."""

    level: str
    format: str


@dataclass(frozen=True, slots=True)
class Config:
    """All of it.  ``node`` is empty where the id is to be computed."""

    node: str
    roles: tuple[Role, ...]
    store: StoreConfig
    limits: LimitsConfig
    worker: WorkerConfig
    head: HeadConfig
    verify: VerifyConfig
    log: LogConfig
