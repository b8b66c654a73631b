"""The places of a store, as values to print: what ``ls``, ``status`` and ``demo`` show of a checkpoint."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptsync.catalogue.summary import Catalogue, Summary
from ckptsync.config import reach
from ckptsync.config.loading import from_environment, load
from ckptsync.config.readers import bandwidth
from ckptsync.config.units import show_size
from ckptsync.errors import ConfigError, Corrupt
from ckptsync.paths import checked_path
from ckptsync.records.names import consolidated_prefix
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


def checked_name(name: str, what: str) -> str:
    """``name`` itself, if ``what`` (a run, or a checkpoint) can have such a name; raises ConfigError."""
    try:
        return checked_path(name)
    except Corrupt as e:
        raise ConfigError(f"{name!r}: not a name that a {what} can have", hint="`ckptsync ls` shows what is there") from e


def fault_lines(catalogue: Catalogue) -> list[str]:
    """A line for each record that cannot be read."""
    return [f"{fault.name}: {fault.error}" for fault in catalogue.faults]


def exit_code(catalogue: Catalogue) -> int:
    """The worst of what cannot be read; 0 if all can."""
    return max((fault.error.exit_code for fault in catalogue.faults), default=0)


def described(store: Store, seen: Summary) -> dict[str, Any]:
    """One place, for ``--json``."""
    return {
        "run": seen.run,
        "checkpoint": seen.checkpoint,
        "place": seen.place,
        "word": seen.word,
        "evidence": list(seen.evidence),
        "lost": list(seen.lost),
        "nodes": list(seen.nodes),
        "files": seen.files,
        "bytes": seen.size,
        "model_complete": seen.model,
        "resume_complete": seen.resume,
        "missing_for_resume": list(seen.lacks),
        "model": model(store, seen),
        "proof": {
            "holds": seen.proof.holds,
            "verdict": seen.proof.verdict,
            "level": seen.proof.level,
            "when": seen.proof.when or None,
        },
    }


def row(store: Store, seen: Summary) -> list[str]:
    """One place, as a line of a table under `HEADING`."""
    return [seen.run, seen.place, seen.word, show_size(seen.size), str(len(seen.nodes)), detail(store, seen)]


def detail(store: Store, seen: Summary) -> str:
    """Why it is no better; where the model lies, if it is as good as can be."""
    where = model(store, seen)
    if seen.word in ("VERIFIED", "CONSOLIDATED") and where:
        level = f" ({seen.proof.level})" if seen.word == "VERIFIED" else ""
        return f"{where}{level}"
    return first_of(seen.lost or seen.evidence)


def first_of(lines: Sequence[str]) -> str:
    """The first line, and how many more there are."""
    more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
    return f"{lines[0]}{more}" if lines else ""


def model(store: Store, seen: Summary) -> str | None:
    """Where the consolidated model lies, if it is whole."""
    if not seen.sealed:
        return None
    return f"{store.url.rstrip('/')}/{consolidated_prefix(seen.run, seen.place).rstrip('/')}"
