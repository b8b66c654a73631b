"""What a configuration says, as frozen values.  Durations are seconds, sizes are bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from ckptsync.fleet.alarms import KINDS
from ckptsync.head.rules import Best, Rules
from ckptsync.merge.plan import DType
from ckptsync.records.report import Level
from ckptsync.stores.limits import Schedule

Role = Literal["worker", "head", "verifier"]
ROLES: tuple[Role, ...] = ("worker", "head", "verifier")
ALARMS = KINDS


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

    bandwidth: Schedule | None
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
    """How often to look for what is to be done, and how models are made.

    ``config_from`` maps a run (or ``*``) to where config and tokenizer lie.  ``allow_code``: models get code out of checkpoints, too.  ``jobs``: child processes at once.  ``threads``: of one merge.
    ``patience_node``: seconds of silence after which a node counts as lost.
    """

    every: float
    dtype: DType
    max_shard_size: int
    config_from: Mapping[str, str]
    allow_code: bool
    jobs: int
    threads: int
    engine: Literal["local", "ray"]
    patience_node: float


@dataclass(frozen=True, slots=True)
class VerifyConfig:
    """``level``; within which ``period`` every byte is read again; ``tick`` is how often to look what is due."""

    level: Level
    period: float
    tick: float


@dataclass(frozen=True, slots=True)
class RetentionConfig(Rules):
    """What is kept of every run; ``runs`` (or globs of their names) with what is said of them instead; how long a tombstone stands before."""

    grace: float = 86400.0
    runs: Mapping[str, Mapping[str, int | float | Best | None]] = field(default_factory=dict)

    def of(self, run: str) -> Rules:
        """What holds for one run: its own name counts, or else the first glob that it matches."""
        rules = Rules(**{rule.name: getattr(self, rule.name) for rule in fields(Rules)})
        names = (run, *(name for name in self.runs if fnmatchcase(run, name)))
        said: Mapping[str, Any] = next((self.runs[name] for name in names if name in self.runs), {})
        return replace(rules, **said)


@dataclass(frozen=True, slots=True)
class AlertsConfig:
    """Whom to tell of which alarms, and after how many seconds again.  The webhook's URL may be a secret, so nothing prints it."""

    webhook: str = field(repr=False)
    command: tuple[str, ...]
    on: tuple[str, ...]
    repeat: float


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """``listen``: host and port, or nothing."""

    listen: str


@dataclass(frozen=True, slots=True)
class LogConfig:
    """``level`` is one of logging's, in lower case; ``format`` is ``text``, ``json`` or ``auto``: text on a terminal, else JSON."""

    level: str
    format: str


@dataclass(frozen=True, slots=True)
class Config:
    """All of it.  ``node`` is empty where the id is to be computed.

    ``overridden``: a line for each key of the file that a variable overrides with another value; no line holds a secret.
    """

    node: str
    roles: tuple[Role, ...]
    store: StoreConfig
    limits: LimitsConfig
    worker: WorkerConfig
    head: HeadConfig
    verify: VerifyConfig
    retention: RetentionConfig
    alerts: AlertsConfig
    metrics: MetricsConfig
    log: LogConfig
    overridden: tuple[str, ...] = field(default=(), compare=False)
