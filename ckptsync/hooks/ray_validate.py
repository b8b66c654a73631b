"""``ValidationConfig(fn=validate)``: a checkpoint that was reported is verified, in a task of its own, while the training goes on."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any, get_args

from ckptsync.errors import ConfigError, StoreError
from ckptsync.hooks import ray_note
from ckptsync.hooks.ray_bring import opened, reached
from ckptsync.hooks.ray_note import Note
from ckptsync.records.report import Level, Report
from ckptsync.verify.findings import DAMAGE
from ckptsync.verify.reporting import write_report
from ckptsync.verify.target import Asked, InStore, Plain, target, verify

_log = logging.getLogger("ckptsync.hook")
_RANK = {"ok": 0, "arriving": 1, "damaged": 2}


def validate(checkpoint: Any, level: str | Mapping[str, str] | None = "") -> dict[str, Any]:
    """Metrics: ``ckptsync_verdict`` (ok, arriving, damaged), ``ckptsync_level`` that was reached, ``ckptsync_read`` (bytes), ``ckptsync_findings`` (what damage, at most ten).

    ``level``: digest where it is in a store, parse where Ray's storage holds it, unless said: stat, digest, parse, load, model (`ckptsync help verify`); ``task_config``'s
    ``fn_kwargs`` can say it, or, up to Ray 2.53, ``validate_config={"level": …}`` of the report.  Damage is no exception: the metrics are attached to the checkpoint, and it is logged.  Raises what a verification raises.
    """
    if not isinstance(level, str):
        level = (level or {}).get("level", "")
    if level and level not in get_args(Level):
        raise ConfigError(f"level {level!r}: one of {', '.join(get_args(Level))} is wanted")
    note = ray_note.read(checkpoint)
    if note is not None:
        return _metrics(note.url, _verified(_stored(note), _asked(level or "digest")))
    with checkpoint.as_directory() as local:
        return _metrics(checkpoint.path, _verified(_plain(local), _asked(level or "parse")))


def _verified(where: InStore | Plain, asked: Asked) -> list[Report]:
    """Verify, and record in a store what is new to it."""
    reports = []
    for one in verify(where, asked):
        reports.append(one.report)
        if isinstance(where, InStore) and one.news:
            try:
                write_report(where.store, one.news)
            except StoreError as e:  # a training's key may only send: the metrics say what was found
                _log.warning("ckptsync: what was found is not recorded in the store: %s", e)
    return reports


def _asked(level: str) -> Asked:
    (known,) = (one for one in get_args(Level) if one == level)
    return Asked(known, time.time())


def _stored(note: Note) -> InStore:
    return InStore(opened(note, reached()), note.run, note.location)


def _plain(local: str) -> InStore | Plain:
    return target(local, reached())


def _metrics(name: str, reports: list[Report]) -> dict[str, Any]:
    worst = max(reports, key=lambda r: _RANK[r.verdict])
    damage = [f"{f.kind}: {f.name}: {f.detail}" for r in reports for f in r.findings if f.kind in DAMAGE]
    for text in damage[:10]:
        _log.error("ckptsync: %s: %s", name, text)
    return {
        "ckptsync_verdict": worst.verdict,
        "ckptsync_level": worst.level,
        "ckptsync_read": sum(r.read for r in reports),
        "ckptsync_findings": damage[:10],
    }
