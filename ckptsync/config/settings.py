"""The table of every key: how its value is read, its default, and which environment variable overrides it.

Defaults are written as a person would write them, and pass the same readers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ckptsync.config.readers import (
    bandwidth,
    budget,
    cleaning,
    count,
    directories,
    duration,
    globs,
    location,
    node,
    one_of,
    period,
    roles,
    runs,
    size,
    some,
    spool_full,
    storage_options,
    yes_or_no,
)
from ckptsync.config.readers_head import RULES, alarms, by_run, command, listen, webhook
from ckptsync.config.values import ALARMS
from ckptsync.merge.plan import DTYPES
from ckptsync.records.report import LEVELS


@dataclass(frozen=True, slots=True)
class Setting:
    """``default`` passes ``read`` too.  ``environment`` is empty where a value is too rich for a variable.  No message shows a value that ``is_secret``."""

    read: Callable[[object], Any]
    default: object
    environment: str = ""
    is_secret: bool = False


_UNSAID = {"keep_best": "", "shards": "keep"}
SETTINGS: dict[str, Setting] = {
    "node": Setting(node, "", "CKPTSYNC_NODE"),
    "roles": Setting(roles, ["worker"], "CKPTSYNC_ROLES"),
    "store.url": Setting(location, "", "CKPTSYNC_STORE"),
    "store.options": Setting(storage_options, {}, "CKPTSYNC_STORAGE_OPTIONS", is_secret=True),
    "limits.bandwidth": Setting(bandwidth, "off", "CKPTSYNC_LIMITS_BANDWIDTH"),
    "limits.threads": Setting(some, 4, "CKPTSYNC_LIMITS_THREADS"),
    "limits.memory": Setting(size, "96MiB", "CKPTSYNC_LIMITS_MEMORY"),
    "limits.patience": Setting(duration, "2m", "CKPTSYNC_LIMITS_PATIENCE"),
    "limits.stall": Setting(period, "60s", "CKPTSYNC_LIMITS_STALL"),
    "worker.runs": Setting(runs, []),
    "worker.quiet": Setting(duration, "10s", "CKPTSYNC_WORKER_QUIET"),
    "worker.unmarked": Setting(duration, "60s", "CKPTSYNC_WORKER_UNMARKED"),
    "worker.scan_every": Setting(period, "30s", "CKPTSYNC_WORKER_SCAN_EVERY"),
    "worker.keep_pins": Setting(count, 2, "CKPTSYNC_WORKER_KEEP_PINS"),
    "worker.order": Setting(one_of("oldest", "newest"), "oldest", "CKPTSYNC_WORKER_ORDER"),
    "worker.superseded": Setting(one_of("keep", "drop"), "keep", "CKPTSYNC_WORKER_SUPERSEDED"),
    "worker.send": Setting(one_of("all", "no-optimizer", "weights"), "all", "CKPTSYNC_WORKER_SEND"),
    "worker.include": Setting(globs, [], "CKPTSYNC_WORKER_INCLUDE"),
    "worker.exclude": Setting(globs, [], "CKPTSYNC_WORKER_EXCLUDE"),
    "worker.spool_budget": Setting(budget, "off", "CKPTSYNC_WORKER_SPOOL_BUDGET"),
    "worker.spool_full": Setting(spool_full, "oldest", "CKPTSYNC_WORKER_SPOOL_FULL"),
    "worker.clean": Setting(cleaning, "off", "CKPTSYNC_WORKER_CLEAN"),
    "worker.keep_local": Setting(some, 2, "CKPTSYNC_WORKER_KEEP_LOCAL"),
    "head.every": Setting(period, "30s", "CKPTSYNC_HEAD_EVERY"),
    "head.dtype": Setting(one_of(*DTYPES), "auto", "CKPTSYNC_HEAD_DTYPE"),
    "head.max_shard_size": Setting(size, "5GB", "CKPTSYNC_HEAD_MAX_SHARD_SIZE"),
    "head.config_from": Setting(directories, {}),
    "head.allow_code": Setting(yes_or_no, default=False, environment="CKPTSYNC_HEAD_ALLOW_CODE"),
    "head.jobs": Setting(some, 1, "CKPTSYNC_HEAD_JOBS"),
    "head.threads": Setting(some, 2, "CKPTSYNC_HEAD_THREADS"),
    "head.engine": Setting(one_of("local", "ray"), "local", "CKPTSYNC_HEAD_ENGINE"),
    "head.patience_node": Setting(period, "10m", "CKPTSYNC_HEAD_PATIENCE_NODE"),
    "verify.level": Setting(one_of(*LEVELS), "digest", "CKPTSYNC_VERIFY_LEVEL"),
    "verify.period": Setting(period, "7d", "CKPTSYNC_VERIFY_PERIOD"),
    "verify.tick": Setting(period, "1m", "CKPTSYNC_VERIFY_TICK"),
    **{
        f"retention.{key}": Setting(read, _UNSAID.get(key, "off"), f"CKPTSYNC_RETENTION_{key.upper()}")
        for key, read in RULES.items()
    },
    "retention.grace": Setting(duration, "1d", "CKPTSYNC_RETENTION_GRACE"),
    "retention.runs": Setting(by_run, {}),
    "alerts.webhook": Setting(webhook, "", "CKPTSYNC_ALERTS_WEBHOOK", is_secret=True),
    "alerts.command": Setting(command, [], "CKPTSYNC_ALERTS_COMMAND", is_secret=True),
    "alerts.on": Setting(alarms, list(ALARMS), "CKPTSYNC_ALERTS_ON"),
    "alerts.repeat": Setting(period, "6h", "CKPTSYNC_ALERTS_REPEAT"),
    "metrics.listen": Setting(listen, "", "CKPTSYNC_METRICS_LISTEN"),
    "log.level": Setting(one_of("debug", "info", "warning", "error"), "info", "CKPTSYNC_LOG_LEVEL"),
    "log.format": Setting(one_of("auto", "text", "json"), "auto", "CKPTSYNC_LOG_FORMAT"),
}
SECTIONS = tuple(dict.fromkeys(key.split(".")[0] for key in SETTINGS if "." in key))
