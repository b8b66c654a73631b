"""The locations of a store, as values to print: what ``ls``, ``status`` and ``demo`` show of a checkpoint."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptsync.catalogue.summary import TOKENIZER, Catalogue, Summary
from ckptsync.config import loading
from ckptsync.config.loading import from_environment, load
from ckptsync.config.readers import bandwidth
from ckptsync.config.schema import Config
from ckptsync.errors import ConfigError, Corrupt
from ckptsync.paths import checked_path
from ckptsync.records.names import consolidated_prefix
from ckptsync.records.saves import Sibling
from ckptsync.stores.contract import Store
from ckptsync.stores.limits import Schedule
from ckptsync.stores.opening import open_store
from ckptsync.stores.trees import Access
from ckptsync.stores.urls import Remote, located
from ckptsync.units import clean, show_size

HEADING = ("RUN", "CHECKPOINT", "STATE", "SIZE", "NODES", "DETAIL")


def configuration(args: argparse.Namespace) -> Config | None:
    """The configuration that ``-c`` names, if it names one, read once a command; raises ConfigError.

    Says on stderr which of its keys a variable overrides.
    """
    if not getattr(args, "config", None):
        return None
    if "loaded" not in args:
        args.loaded = read_configuration(Path(args.config))
    found: Config = args.loaded
    return found


def read_configuration(path: Path, environment: Mapping[str, str] = os.environ) -> Config:
    """The configuration in a file; says on stderr which of its keys a variable overrides.  Raises ConfigError."""
    config = load(path, environment)
    for line in config.overridden:
        print(clean(f"ckptsync: warning: {line}"), file=sys.stderr)
    return config


def asked_store(args: argparse.Namespace) -> Store:
    """The store that is named: by the command line, by the configuration, or by CKPTSYNC_STORE; raises ConfigError if by none."""
    if args.config and args.url:
        raise ConfigError(f"{args.url}: a store and a configuration are given", hint="give one of them")
    access = reached(args)
    if config := configuration(args):
        named = config.store.url
        return open_store(named, loading.options_for(named, access.options), access.limits)
    url = args.url or os.environ.get("CKPTSYNC_STORE")
    if not url:
        raise ConfigError("no store was named", hint="give its URL, a configuration with -c, or set CKPTSYNC_STORE")
    return open_store(url, options_for(url, access), access.limits)


def reached(args: argparse.Namespace) -> Access:
    """How the locations that the command line names are reached: as the -c file says, or the environment; raises ConfigError."""
    if config := configuration(args):
        options, asked = config.store.options, config.limits
    else:
        options, asked = from_environment()
    if getattr(args, "bandwidth", None) is not None:
        asked = replace(asked, bandwidth=_bandwidth(args.bandwidth))
    return Access(options, loading.limits_of(asked))


def options_for(url: str, access: Access) -> Mapping[str, object]:
    """Options of the environment are for stores elsewhere, and no error where a path is named."""
    return loading.options_for(url, access.options) if isinstance(located(url), Remote) else {}


def _bandwidth(text: str) -> Schedule | None:
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


def described(store: Store, summaries: Sequence[Summary]) -> list[dict[str, Any]]:
    """Return all locations of a store, for ``--json``."""
    newest = _newest(summaries)
    return [_described(store, seen, newest) for seen in summaries]


def rows(store: Store, summaries: Sequence[Summary]) -> list[list[str]]:
    """Return all locations of a store, as lines of a table under `HEADING`."""
    newest = _newest(summaries)
    return [_row(store, seen, newest) for seen in summaries]


def _newest(summaries: Sequence[Summary]) -> dict[tuple[str, str], Summary]:
    """Return the save that was written last of each run and checkpoint: a training that was resumed writes ``final`` once more."""
    there = sorted((s for s in summaries if not s.retired), key=lambda s: (s.ended, s.location))
    return {(s.run, s.checkpoint): s for s in there}


def _newer(seen: Summary, newest: Mapping[tuple[str, str], Summary]) -> str:
    """Return the location of the newest save of the same name, if this is an older one that is not retired; else nothing.

    What may be another part of this one is not a newer save.
    """
    last = newest.get((seen.run, seen.checkpoint), seen)
    is_older = last.ended > seen.ended and not seen.retired
    return last.location if is_older and last.location not in (seen.location, *(s.location for s in seen.siblings)) else ""


def _described(store: Store, seen: Summary, newest: Mapping[tuple[str, str], Summary]) -> dict[str, Any]:
    return {
        "run": seen.run,
        "checkpoint": seen.checkpoint,
        "location": seen.location,
        "status": seen.status,
        "newer": _newer(seen, newest) or None,
        "evidence": list(seen.evidence),
        "lost": list(seen.lost),
        "siblings": siblings(store.url, seen.run, seen.location, seen.siblings),
        "nodes": list(seen.nodes),
        "files": seen.files,
        "bytes": seen.size,
        "model_complete": seen.model,
        "resume_complete": seen.resume,
        "missing_for_resume": list(seen.lacks),
        "model": model(store, seen),
        "left_out": list(seen.left_out),
        "missing_to_open": list(seen.to_open),
        "hint": seen.to_give or None,
        "proof": {
            "holds": seen.proof.holds,
            "verdict": seen.proof.verdict,
            "level": seen.proof.level,
            "when": seen.proof.when or None,
        },
    }


def siblings(url: str, run: str, location: str, found: Iterable[Sibling]) -> list[dict[str, Any]]:
    """Return other locations with parts of a save, for ``--json``."""
    return [
        {"location": s.location, "nodes": list(s.nodes), "against": list(s.against), "join": s.command(url, run, location)}
        for s in found
    ]


def sibling_line(url: str, run: str, location: str, found: Sibling) -> str:
    """Return what is known of another location with parts of a save, and how to join them."""
    nodes, command = ", ".join(found.nodes), found.command(url, run, location)
    if not found.against:
        return f"{found.location} of {nodes} is another part of it; bring them together: {command}"
    return f"{found.location} of {nodes} may be another part of it ({'; '.join(found.against)}); if it is: {command}"


def _row(store: Store, seen: Summary, newest: Mapping[tuple[str, str], Summary]) -> list[str]:
    newer = _newer(seen, newest)
    beside = [sibling_line(store.url, seen.run, seen.location, s) for s in seen.siblings]
    said = "; ".join(filter(None, (detail(store, seen), f"{newer} is newer" if newer else "", *beside)))
    return [seen.run, seen.location, seen.status, show_size(seen.size), str(len(seen.nodes)), said]


def detail(store: Store, seen: Summary) -> str:
    """Why it is no better; where the model lies, if it is as good as can be."""
    where = model(store, seen)
    if seen.status in ("VERIFIED", "CONSOLIDATED") and where:
        level = f" ({seen.proof.level})" if seen.status == "VERIFIED" else ""
        left = f"; code left out: {', '.join(seen.left_out)}" if seen.left_out else ""
        closed = f"{seen.unopenable}; {seen.to_give}; " if seen.unopenable else ""
        tokenizer = "; no tokenizer" if TOKENIZER in seen.to_open else ""
        return f"{closed}{where}{level}{tokenizer}{left}"
    return first_of(seen.lost or seen.evidence)


def first_of(lines: Sequence[str]) -> str:
    """The first line, and how many more there are."""
    more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
    return f"{lines[0]}{more}" if lines else ""


def model(store: Store, seen: Summary) -> str | None:
    """Where the consolidated model lies, if it is whole."""
    if not seen.consolidated:
        return None
    return f"{store.url.rstrip('/')}/{consolidated_prefix(seen.run, seen.location).rstrip('/')}"
