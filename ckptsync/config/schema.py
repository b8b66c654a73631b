"""Every key of the configuration: its name, type, reader, default, variable and text, each once.

The loader, the errors and ``docs/configuration.md`` are made from this table, so that they cannot
differ.  A section is a frozen dataclass, and each of its fields is a key.  A default is written as
a user would write it, and is read by the key's own reader.  The environment variable of
``worker.quiet`` is ``CKPTSYNC_WORKER_QUIET``.  Durations are seconds, sizes are bytes.
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
from ckptsync.merger.plan import DTYPES, DType
from ckptsync.records.report import Level, checked_level
from ckptsync.status.alarms import KINDS
from ckptsync.stores.limits import Schedule


@dataclass(frozen=True, slots=True)
class Key:
    """How a key is read, and its text in the documentation.

    ``read`` raises ValueError for a wrong value.  ``default``: as a user would write it.
    ``variable``: its environment variable; None for `variable_of`, empty if the value does not fit
    into one.  No message shows a value that ``is_secret``.
    """

    read: Callable[[object], Any]
    default: object
    text: str
    variable: str | None = None
    is_secret: bool = False


def _key(
    read: Callable[[object], Any],
    default: object,
    text: str,
    *,
    variable: str | None = None,
    is_secret: bool = False,
) -> Any:
    """Return a dataclass field with a `Key` in its metadata, and the default as it is read."""
    key = Key(read, default, text, variable, is_secret)
    return field(default_factory=lambda: read(default), repr=not is_secret, metadata={"key": key})


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Where checkpoints are gathered."""

    url: str = _key(
        value_parsers.location,
        "",
        "The store, the same on every machine: an absolute path (a mounted NFS share too), "
        "`s3://bucket/prefix`, `sftp://host/path`, or a URL of another scheme that fsspec"
        " has.",
        variable="CKPTSYNC_STORE",
    )
    options: Mapping[str, object] = _key(
        value_parsers.storage_options,
        {},
        "Options of the store's client, by the names that s3fs and fsspec give them. No keys "
        "here: S3 finds them in `AWS_PROFILE`, `~/.aws`, `AWS_ACCESS_KEY_ID` or the "
        "instance's role, SSH in its agent or `~/.ssh`. fsspec's own configuration "
        "(`~/.config/fsspec`, `FSSPEC_S3_ENDPOINT_URL`, …) completes them; options for S3 and "
        "SFTP that are not used are logged. The variable takes JSON.",
        variable="CKPTSYNC_STORAGE_OPTIONS",
        is_secret=True,
    )


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """What transfers may take, all of a process together: see `ckptsync.stores.limits.Limits`."""

    bandwidth: Schedule | None = _key(
        value_parsers.bandwidth,
        "off",
        "Bytes a second of all transfers together: a rate (`50MB/s`), or a timetable in "
        "rclone's notation (`08:00,50M 19:00,off`, `Mon-08:00,10M Sat-00:00,off`).",
    )
    threads: int = _key(
        value_parsers.positive_count,
        4,
        "Parts of files on their way at once.",
    )
    memory: int = _key(
        value_parsers.size,
        "96MiB",
        "The memory that these parts may hold.",
    )
    patience: float = _key(
        value_parsers.duration,
        "2m",
        "For how long what fails for a moment (a reset, a 503) is tried again.",
    )
    stall: float = _key(
        value_parsers.period,
        "60s",
        "After how long without a byte a transfer is broken off, and tried again.",
    )


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """When a checkpoint is finished, what to upload and in which order, what to keep."""

    runs: tuple[RunConfig, ...] = _key(
        value_parsers.runs,
        [],
        "Output directories of trainings, each `path: DIR` with an optional `name: RUN`. "
        "A path may be a glob; new directories are seen as they appear. Without a name the "
        "run is called as the directory, or as what the wildcards before it matched. "
        "Directories of other users, or that all may write to, are left out of a glob; "
        "`ckptsync status` says why.",
        variable="",
    )
    quiet: float = _key(
        value_parsers.duration,
        "10s",
        "A checkpoint that says it is finished is uploaded when nothing in it has changed for"
        " this long.",
    )
    unmarked: float = _key(
        value_parsers.duration,
        "60s",
        "The same for one without such a sign (a node that holds only shards).",
    )
    scan_every: float = _key(
        value_parsers.period,
        "30s",
        "How often to scan a directory, and to ask the store: half as often each time nothing"
        " has changed, up to five minutes. An event, or a new name, starts a scan earlier. "
        "For 1,000 output directories: 5m.",
    )
    keep_pins: int = _key(
        value_parsers.count,
        2,
        "How many verified checkpoints stay pinned on this node (hard links in "
        "`OUT/_ckptsync`), to repair the store from.",
    )
    order: Literal["oldest", "newest"] = _key(
        one_of("oldest", "newest"),
        "oldest",
        "Which finished checkpoint is uploaded first: oldest or newest.",
    )
    superseded: Literal["keep", "drop"] = _key(
        one_of("keep", "drop"),
        "keep",
        "keep: each save is uploaded. drop: not one that a newer one overtook.",
    )
    send: Literal["all", "no-optimizer", "weights"] = _key(
        one_of("all", "no-optimizer", "weights"),
        "all",
        "all; no-optimizer (training cannot resume from the store); weights (the model and "
        "what describes it).",
    )
    include: tuple[str, ...] = _key(
        value_parsers.globs,
        [],
        'Of that, globs of files in a checkpoint, such as `["*.safetensors", "*.json"]`; '
        "`[]` is every file. The small files that a merge needs are always uploaded.",
    )
    exclude: tuple[str, ...] = _key(
        value_parsers.globs,
        [],
        'Globs of files that are not uploaded, such as `["rng_state*"]`.',
    )
    spool_budget: int = _key(
        value_parsers.or_off(value_parsers.size),
        "off",
        "What pins may hold that the trainer has deleted already: a size, or off (what the "
        "next save needs stays free).",
    )
    spool_full: str = _key(
        value_parsers.spool_full,
        "oldest",
        "What goes when that is full: oldest (the oldest that is not uploaded), every:N (all "
        "but the newest and each Nth), wait (nothing, and nothing new is pinned).",
    )
    clean: Literal["off", "verified"] = _key(
        one_of("off", "verified"),
        "off",
        "verified: delete local checkpoints that the store holds and has verified, but for "
        "the newest `keep_local`.",
    )
    keep_local: int = _key(
        value_parsers.positive_count,
        2,
        "See `clean`.",
    )
    logs: bool = _key(
        value_parsers.yes_or_no,
        default=True,
        text="Whether logs (`trainer_log.jsonl`, TensorBoard's files, results, YAML; at most 64 "
        "MB a run) go to `<run>/logs/<node>/`, too.",
    )


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """How often to look for work, and how models are made."""

    every: float = _key(
        value_parsers.period,
        "30s",
        "How often to look for work: complete checkpoints to consolidate, models to repair.",
    )
    dtype: DType = _key(
        one_of(*DTYPES),
        "auto",
        "auto (each tensor as the model has it), keep (the most precise copy stored), bf16, "
        "fp16 or fp32.",
    )
    max_shard_size: int = _key(
        value_parsers.size,
        "5GB",
        "The largest size of a file of weights.",
    )
    config_from: Mapping[str, str] = _key(
        value_parsers.directories,
        {},
        "Where config and tokenizer lie for runs whose checkpoints have none (FSDP): run, or "
        '`"*"` for all: directory.',
        variable="",
    )
    adapters: Mapping[str, str] = _key(
        value_parsers.bases,
        {},
        "The model that LoRA adapters are summed into, a directory or URL, so that their models "
        "are whole ones: `{into: BASE}`, or by run `{into: {RUN: BASE}}`.",
        variable="",
    )
    allow_code: bool = _key(
        value_parsers.yes_or_no,
        default=False,
        text="Whether code in a checkpoint (`modeling_*.py`, `auto_map`) is copied into its "
        "model. Whoever can write to the store can put it there. Code in `config_from` is "
        "copied anyway.",
    )
    jobs: int = _key(
        value_parsers.positive_count,
        1,
        "Merges at once, each in a process of its own; one verification runs beside them.",
    )
    threads: int = _key(
        value_parsers.positive_count,
        2,
        "Threads of one merge.",
    )
    engine: Literal["local", "ray"] = _key(
        one_of("local", "ray"),
        "local",
        "Where models are made: local, or ray (on a cluster).",
    )
    statistics: bool = _key(
        value_parsers.yes_or_no,
        default=True,
        text="Whether norms, NaNs, infinities and zeros of each tensor are counted: `ckptsync "
        "ls` and the page show them.",
    )
    norm_jump: float = _key(
        value_parsers.or_off(value_parsers.factor),
        2,
        "An alarm where a tensor's norm changes by this factor from one checkpoint to the next, "
        "and by far more than before; off: never.",
    )
    patience_node: float = _key(
        value_parsers.period,
        "10m",
        "After how long without a sign of life a node counts as lost, and what only it could "
        "upload as never to come.",
    )


@dataclass(frozen=True, slots=True)
class VerifyConfig:
    """How stores are read again."""

    level: Level = _key(
        checked_level,
        "digest",
        "stat (names and sizes), digest (every byte), parse (and every header) or load (and "
        "every tensor, in a child process; wants torch).",
    )
    period: float = _key(
        value_parsers.period,
        "7d",
        "Every byte is read again within this time, a little at each scan.",
    )
    tick: float = _key(
        value_parsers.period,
        "1m",
        "How often to look for what is due.",
    )


@dataclass(frozen=True, slots=True)
class RetentionConfig(Rules):
    """What is kept of every run.

    Nothing is deleted until there is a rule; what any rule keeps stays, and so does the last
    verified checkpoint.
    """

    keep_last: int = _key(
        value_parsers.RULES["keep_last"],
        "off",
        "Keep the newest N.",
    )
    keep_every: int = _key(
        value_parsers.RULES["keep_every"],
        "off",
        "Keep every step that is a multiple of N.",
    )
    keep_best: Best | None = _key(
        value_parsers.RULES["keep_best"],
        "",
        "Keep the best N by a metric of `trainer_state.json` or of an event: "
        "`eval_loss:2` (the lowest) or `max:eval_accuracy:2`.",
    )
    max_age: float = _key(
        value_parsers.RULES["max_age"],
        "off",
        "Delete what is older.",
    )
    max_size: int = _key(
        value_parsers.RULES["max_size"],
        "off",
        "Delete the oldest while a run takes more.",
    )
    shards: int | None = _key(
        value_parsers.RULES["shards"],
        "keep",
        "keep, or drop-after:N: the trainer's own files are deleted while the consolidated "
        "model stays, but for the newest N.",
    )
    grace: float = _key(
        value_parsers.duration,
        "1d",
        "How long a checkpoint that is to be deleted is only marked.",
    )
    runs: Mapping[str, Mapping[str, int | float | Best | None]] = _key(
        value_parsers.by_run,
        {},
        'Other rules for some runs, by name or glob: `{"exp-*": {keep_last: 5, shards: keep}}`.',
        variable="",
    )

    @property
    def has_rules(self) -> bool:
        """Return whether any rule for any run can delete a checkpoint."""
        return any(self.of(run) != Rules() for run in ("", *self.runs))

    def of(self, run: str) -> Rules:
        """Return a run's rules: general ones, replaced by its name's, else by its first glob's."""
        rules = Rules(**{rule.name: getattr(self, rule.name) for rule in fields(Rules)})
        names = (run, *(name for name in self.runs if fnmatchcase(run, name)))
        own: Mapping[str, Any] = next((self.runs[name] for name in names if name in self.runs), {})
        return replace(rules, **own)


@dataclass(frozen=True, slots=True)
class AlertsConfig:
    """Whom to tell of which alarms, and after how many seconds again."""

    urls: tuple[str, ...] = _key(
        value_parsers.apprise_urls,
        [],
        "Apprise URLs, such as `slack://…`, `mailto://…`, `jsons://host/path`; spaces "
        "between them in the variable.",
        is_secret=True,
    )
    command: tuple[str, ...] = _key(
        value_parsers.command,
        [],
        "A command that gets the alarm as JSON on its standard input.",
        is_secret=True,
    )
    on: tuple[str, ...] = _key(
        value_parsers.alarms,
        list(KINDS),
        "Of which alarms to tell.",
    )
    repeat: float = _key(
        value_parsers.period,
        "6h",
        "After how long an alarm that stays is told again.",
    )


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """Where Prometheus asks."""

    listen: str = _key(
        value_parsers.listen,
        "",
        "Where Prometheus reads `/metrics`, and anybody `/healthz`: `127.0.0.1:9464`.",
    )


@dataclass(frozen=True, slots=True)
class WebConfig:
    """Where a head, or a verifier, shows the page of its store, and who may see it."""

    listen: str = _key(
        value_parsers.listen_or_path,
        "",
        "Where a head or a verifier shows the page of its store: `127.0.0.1:8265`, or "
        "`unix:/path`. An address that other machines reach needs a token.",
    )
    token: str = _key(
        value_parsers.token,
        "",
        "What a browser must give to see the page.",
        is_secret=True,
    )


@dataclass(frozen=True, slots=True)
class LogConfig:
    """What is logged, and how."""

    level: str = _key(
        one_of("debug", "info", "warning", "error"),
        "info",
        "debug, info, warning or error.",
    )
    format: str = _key(
        one_of("auto", "text", "json"),
        "auto",
        "json, text (`key=value`) or auto (json). On a terminal text and auto are sentences.",
    )


@dataclass(frozen=True, slots=True)
class Config:
    """The whole configuration, as the service uses it.

    ``node``: empty if the id is to be computed.  ``overridden``: a line for each key of the file
    that a variable overrides with another value, without secrets.  ``file``: the absolute path that
    it was read from.
    """

    node: str = _key(
        value_parsers.node,
        "",
        "The node's id in the store: letters, digits, `_`, `.`, `-`. Empty: computed "
        "from the host name and the machine id.",
    )
    roles: tuple[Role, ...] = _key(
        value_parsers.roles,
        ["worker"],
        "What this machine does: worker, head, verifier.",
    )
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
    # secret: a command or URL may contain a token
    events: tuple[Definition, ...] = _key(
        value_parsers.events,
        [],
        "What happens to checkpoints starts commands, or calls URLs; only where a head runs. "
        "See [events.md](events.md).",
        variable="",
        is_secret=True,
    )
    overridden: tuple[str, ...] = field(default=(), compare=False)
    file: str = field(default="", compare=False)

    @property
    def switched_off(self) -> tuple[str, ...]:
        """Return a sentence for each of retention and alerts that is off; () without a head."""
        if "head" not in self.roles:
            return ()
        off = []
        if not self.retention.has_rules:
            off.append("retention is off: nothing is deleted from the store")
        if not (self.alerts.urls or self.alerts.command):
            off.append("alerts are off: damage shows in `ckptsync status` and the log alone")
        return tuple(off)


SECTIONS: dict[str, Callable[..., Any]] = {
    each.name: each.default_factory
    for each in fields(Config)
    if "key" not in each.metadata and each.default_factory is not MISSING
}


def variable_of(key: str) -> str:
    """Return the usual name of a key's environment variable: ``CKPTSYNC_WORKER_QUIET``."""
    return f"CKPTSYNC_{key.upper().replace('.', '_')}"


def _all_keys() -> Iterator[tuple[str, Key]]:
    """Yield the full name (``worker.quiet``) and the `Key` of each key, in documented order.

    ``variable`` is filled in if it was None.
    """
    for section, section_type in {"": Config, **SECTIONS}.items():
        for each in fields(section_type):  # type: ignore[arg-type]
            if key := each.metadata.get("key"):
                name = f"{section}.{each.name}" if section else each.name
                has_own_name = key.variable is not None
                yield name, key if has_own_name else replace(key, variable=variable_of(name))


KEYS: dict[str, Key] = dict(_all_keys())
