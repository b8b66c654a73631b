"""Every key of the configuration: its name, type, reader, default and variable, each once.

A section is a frozen dataclass; each of its fields is a key.  A default is written as a person
would write it, and passes the key's own reader. The environment variable of ``worker.quiet`` is
``CKPTSYNC_WORKER_QUIET``.  Durations are seconds, sizes are bytes.  ``configs/`` explains the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from ckptsync.config import value_parsers
from ckptsync.config.value_parsers import Role, RunConfig, one_of
from ckptsync.events.definitions import Definition
from ckptsync.head.retention_rules import Best, Rules
from ckptsync.merge.plan import DTYPES, DType
from ckptsync.records.report import Level, checked_level
from ckptsync.status.alarms import KINDS
from ckptsync.stores.limits import Schedule


@dataclass(frozen=True, slots=True)
class Key:
    """How a key is read.

    ``variable`` is empty where a value is too rich for one.  No message shows a value that
    ``is_secret``.
    """

    read: Callable[[object], Any]
    default: object
    variable: str | None = None
    is_secret: bool = False


def _key(
    read: Callable[[object], Any],
    default: object,
    *,
    variable: str | None = None,
    is_secret: bool = False,
) -> Any:
    """Return a field of a section."""
    about = Key(read, default, variable, is_secret)
    return field(default_factory=lambda: read(default), repr=not is_secret, metadata={"key": about})


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Where checkpoints are gathered."""

    url: str = _key(value_parsers.location, "", variable="CKPTSYNC_STORE")
    # of the store's client, as s3fs and fsspec call them; they may hold keys
    options: Mapping[str, object] = _key(
        value_parsers.storage_options, {}, variable="CKPTSYNC_STORAGE_OPTIONS", is_secret=True
    )


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """What transfers may take, all of a process together: see `ckptsync.stores.limits.Limits`."""

    bandwidth: Schedule | None = _key(value_parsers.bandwidth, "off")
    threads: int = _key(value_parsers.some, 4)
    memory: int = _key(value_parsers.size, "96MiB")
    patience: float = _key(value_parsers.duration, "2m")
    stall: float = _key(value_parsers.period, "60s")


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """When a checkpoint is finished, what to upload and in which order, what to keep."""

    runs: tuple[RunConfig, ...] = _key(value_parsers.runs, [], variable="")
    quiet: float = _key(value_parsers.duration, "10s")
    # `quiet` of a checkpoint without a sign that it is finished
    unmarked: float = _key(value_parsers.duration, "60s")
    scan_every: float = _key(value_parsers.period, "30s")
    keep_pins: int = _key(value_parsers.count, 2)
    order: Literal["oldest", "newest"] = _key(one_of("oldest", "newest"), "oldest")
    # whether a save that a newer one overtook is uploaded
    superseded: Literal["keep", "drop"] = _key(one_of("keep", "drop"), "keep")
    send: Literal["all", "no-optimizer", "weights"] = _key(
        one_of("all", "no-optimizer", "weights"), "all"
    )
    include: tuple[str, ...] = _key(
        value_parsers.globs, []
    )  # of files in a checkpoint, after `send`
    exclude: tuple[str, ...] = _key(value_parsers.globs, [])
    spool_budget: int = _key(
        value_parsers.or_off(value_parsers.size), "off"
    )  # 0 where the free space decides
    spool_full: str = _key(value_parsers.spool_full, "oldest")  # or wait, or every:N
    clean: Literal["off", "verified"] = _key(one_of("off", "verified"), "off")
    keep_local: int = _key(value_parsers.some, 2)  # the newest checkpoints that cleaning leaves
    logs: bool = _key(value_parsers.yes_or_no, default=True)  # small files beside the checkpoints


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """How often to look for work, and how models are made."""

    every: float = _key(value_parsers.period, "30s")
    dtype: DType = _key(one_of(*DTYPES), "auto")
    max_shard_size: int = _key(value_parsers.size, "5GB")
    # run (or *) → where config and tokenizer lie
    config_from: Mapping[str, str] = _key(value_parsers.directories, {}, variable="")
    # run (or *) → the base that the run's adapters are summed into
    adapters: Mapping[str, str] = _key(value_parsers.bases, {}, variable="")
    # models get code out of checkpoints, too
    allow_code: bool = _key(value_parsers.yes_or_no, default=False)
    jobs: int = _key(value_parsers.some, 1)  # child processes at once
    threads: int = _key(value_parsers.some, 2)  # of one merge
    engine: Literal["local", "ray"] = _key(one_of("local", "ray"), "local")
    # models get a record of their tensors' norms, NaNs and the like
    statistics: bool = _key(value_parsers.yes_or_no, default=True)
    # of silence, after which a node counts as lost
    patience_node: float = _key(value_parsers.period, "10m")


@dataclass(frozen=True, slots=True)
class VerifyConfig:
    """How stores are read again."""

    level: Level = _key(checked_level, "digest")
    period: float = _key(value_parsers.period, "7d")  # within which every byte is read again
    tick: float = _key(value_parsers.period, "1m")  # how often to look what is due


@dataclass(frozen=True, slots=True)
class RetentionConfig(Rules):
    """What is kept of every run: the rules of `Rules`."""

    keep_last: int = _key(value_parsers.RULES["keep_last"], "off")
    keep_every: int = _key(value_parsers.RULES["keep_every"], "off")
    keep_best: Best | None = _key(value_parsers.RULES["keep_best"], "")
    max_age: float = _key(value_parsers.RULES["max_age"], "off")
    max_size: int = _key(value_parsers.RULES["max_size"], "off")
    shards: int | None = _key(value_parsers.RULES["shards"], "keep")
    grace: float = _key(value_parsers.duration, "1d")  # how long a tombstone stands before
    # runs, or globs of their names → the rules that hold for them instead
    runs: Mapping[str, Mapping[str, int | float | Best | None]] = _key(
        value_parsers.by_run, {}, variable=""
    )

    def of(self, run: str) -> Rules:
        """Return the rules of one run: those of its own name, or of the first glob it matches."""
        rules = Rules(**{rule.name: getattr(self, rule.name) for rule in fields(Rules)})
        names = (run, *(name for name in self.runs if fnmatchcase(run, name)))
        own: Mapping[str, Any] = next((self.runs[name] for name in names if name in self.runs), {})
        return replace(rules, **own)


@dataclass(frozen=True, slots=True)
class AlertsConfig:
    """Whom to tell of which alarms, and after how many seconds again."""

    urls: tuple[str, ...] = _key(value_parsers.apprise_urls, [], is_secret=True)
    command: tuple[str, ...] = _key(value_parsers.command, [], is_secret=True)
    on: tuple[str, ...] = _key(value_parsers.alarms, list(KINDS))
    repeat: float = _key(value_parsers.period, "6h")


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """Where Prometheus asks."""

    listen: str = _key(value_parsers.listen, "")  # host and port, or nothing


@dataclass(frozen=True, slots=True)
class WebConfig:
    """Where a head, or a verifier, shows the page of its store, and who may see it."""

    listen: str = _key(value_parsers.listen_or_path, "")  # host and port, unix:/path, or nothing
    token: str = _key(value_parsers.token, "", is_secret=True)


@dataclass(frozen=True, slots=True)
class LogConfig:
    """What is logged, and how."""

    level: str = _key(one_of("debug", "info", "warning", "error"), "info")
    # text: sentences on a terminal, else logfmt; auto: sentences on a terminal, else JSON
    format: str = _key(one_of("auto", "text", "json"), "auto")


@dataclass(frozen=True, slots=True)
class Config:
    """All of it.  ``node`` is empty where the id is to be computed.

    ``overridden``: a line for each key of the file that a variable overrides with another value; no
    line holds a secret.  ``file``: the absolute path that it was read from.
    """

    node: str = _key(value_parsers.node, "")
    roles: tuple[Role, ...] = _key(value_parsers.roles, ["worker"])
    store: StoreConfig = field(default_factory=StoreConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    retention: RetentionConfig = field(default_factory=RetentionConfig)
    alerts: AlertsConfig = field(default_factory=AlertsConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    web: WebConfig = field(default_factory=WebConfig)
    log: LogConfig = field(default_factory=LogConfig)
    # what happens to checkpoints starts commands, or calls URLs; they may hold tokens
    events: tuple[Definition, ...] = _key(value_parsers.events, [], variable="", is_secret=True)
    overridden: tuple[str, ...] = field(default=(), compare=False)
    file: str = field(default="", compare=False)


SECTIONS: dict[str, Callable[..., Any]] = {
    each.name: each.default_factory
    for each in fields(Config)
    if "key" not in each.metadata and each.default_factory is not MISSING
}


def variable_of(key: str) -> str:
    """Return the environment variable of a key, where it has no other name."""
    return f"CKPTSYNC_{key.upper().replace('.', '_')}"


def _all_keys() -> Iterator[tuple[str, Key]]:
    for section, of in {"": Config, **SECTIONS}.items():
        for each in fields(of):  # type: ignore[arg-type]
            if key := each.metadata.get("key"):
                name = f"{section}.{each.name}" if section else each.name
                named = key.variable is not None
                yield name, key if named else replace(key, variable=variable_of(name))


KEYS: dict[str, Key] = dict(_all_keys())
