"""The places of a store, as values to print: what ``ls``, ``status`` and ``demo`` show of a checkpoint."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptsync.config import reach
from ckptsync.config.loading import from_environment, load
from ckptsync.config.readers import bandwidth
from ckptsync.config.units import show_size
from ckptsync.errors import ConfigError
from ckptsync.head.catalogue import Catalogue
from ckptsync.records.names import consolidated_prefix
from ckptsync.records.state import Snapshot
from ckptsync.stores.contract import Store
from ckptsync.stores.opening import open_store
from ckptsync.stores.timetable import Timetable
from ckptsync.stores.trees import Access
from ckptsync.stores.urls import Remote, located

HEADING = ("RUN", "CHECKPOINT", "STATE", "SIZE", "NODES", "DETAIL")


def asked_store(args: argparse.Namespace) -> Store:
    """The store that is named: by the command line, by the configuration, or by CKPTSYNC_STORE; raises ConfigError if by none."""
    if args.config and args.url:
        raise ConfigError(f"{args.url}: a store and a configuration are given", hint="give one of them")
    access = reached(args)
    if args.config:
        named = load(Path(args.config)).store.url
        return open_store(named, reach.options_for(named, access.options), access.limits)
    url = args.url or os.environ.get("CKPTSYNC_STORE")
    if not url:
        raise ConfigError("no store is named", hint="give its URL, a configuration with -c, or set CKPTSYNC_STORE")
    return open_store(url, options_for(url, access), access.limits)


def reached(args: argparse.Namespace) -> Access:
    """How the places that the command line names are reached: as the -c file says, or the environment; raises ConfigError."""
    if getattr(args, "config", None):
        config = load(Path(args.config))
        options, asked = config.store.options, config.limits
    else:
        options, asked = from_environment()
    if getattr(args, "bandwidth", None) is not None:
        asked = replace(asked, bandwidth=_bandwidth(args.bandwidth))
    return Access(options, reach.limits(asked))


def options_for(url: str, access: Access) -> Mapping[str, object]:
    """Options of the environment are for stores elsewhere, and no error where a path is named."""
    return reach.options_for(url, access.options) if isinstance(located(url), Remote) else {}


def _bandwidth(text: str) -> Timetable | None:
    try:
        return bandwidth(text)
    except ValueError as e:
        raise ConfigError(f"--bandwidth: {e}") from e


def fault_lines(catalogue: Catalogue) -> list[str]:
    """A line for each record that cannot be read."""
    return [f"{fault.record}: {fault.error}" for fault in catalogue.faults]


def exit_code(catalogue: Catalogue) -> int:
    """The worst of what cannot be read; 0 if all can."""
    return max((fault.error.exit_code for fault in catalogue.faults), default=0)


def described(store: Store, snapshot: Snapshot) -> dict[str, Any]:
    """One place, for ``--json``."""
    facets = snapshot.facets
    return {
        "run": snapshot.run,
        "checkpoint": snapshot.checkpoint,
        "place": snapshot.place,
        "word": snapshot.word,
        "evidence": damage(snapshot) or list(snapshot.evidence),
        "nodes": nodes(snapshot),
        "files": len(snapshot.files),
        "bytes": size(snapshot),
        "model_complete": facets.model.holds,
        "resume_complete": facets.resume.holds,
        "missing_for_resume": list(facets.resume.evidence),
        "model": model(store, snapshot),
        "proof": {
            "holds": facets.proof.holds,
            "verdict": facets.proof.verdict,
            "level": facets.proof.level,
            "when": facets.proof.when or None,
        },
    }


def row(store: Store, snapshot: Snapshot) -> list[str]:
    """One place, as a line of a table under `HEADING`."""
    return [
        snapshot.run,
        snapshot.place,
        snapshot.word,
        show_size(size(snapshot)),
        str(len(nodes(snapshot))),
        detail(store, snapshot),
    ]


def detail(store: Store, snapshot: Snapshot) -> str:
    """Why it is no better; where the model lies, if it is as good as can be."""
    where = model(store, snapshot)
    if snapshot.word in ("VERIFIED", "CONSOLIDATED") and where:
        level = f" ({snapshot.facets.proof.level})" if snapshot.word == "VERIFIED" else ""
        return f"{where}{level}"
    return first_of(damage(snapshot) if snapshot.word == "DAMAGED" else snapshot.evidence)


def damage(snapshot: Snapshot) -> list[str]:
    """What the reports that nobody has answered found."""
    reports = [snapshot.records.reports[name] for name in snapshot.facets.proof.damage]
    findings = [f for report in reports for f in report.findings if f.kind not in ("note", "nonfinite")]
    return list(dict.fromkeys(f"{f.name}: {f.kind}: {f.detail}" for f in findings))


def first_of(lines: Sequence[str]) -> str:
    """The first line, and how many more there are."""
    more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
    return f"{lines[0]}{more}" if lines else ""


def nodes(snapshot: Snapshot) -> list[str]:
    """The nodes whose manifests count."""
    return sorted({known.manifest.node for known in snapshot.manifests})


def size(snapshot: Snapshot) -> int:
    """Bytes of the checkpoint's own files that are there, without the consolidated model."""
    return sum(size for _, size in snapshot.present().values())


def model(store: Store, snapshot: Snapshot) -> str | None:
    """Where the consolidated model lies, if it is whole."""
    if not snapshot.facets.sealed.holds:
        return None
    return f"{store.url.rstrip('/')}/{consolidated_prefix(snapshot.run, snapshot.place).rstrip('/')}"
