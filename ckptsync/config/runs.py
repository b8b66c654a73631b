"""Which output directories are there now, and under which run names.

Looked up before every tick: a glob takes in the jobs that start later.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from glob import glob
from pathlib import Path

from ckptsync.config.settings import run_name
from ckptsync.config.values import RunConfig

_MAGIC = frozenset("*?[")


@dataclass(frozen=True, slots=True)
class OutputDirectories:
    """``runs``: every one with a name of its own, by path.  ``problems``: why others were left out."""

    runs: tuple[RunConfig, ...]
    problems: tuple[str, ...]


def output_directories(runs: Iterable[RunConfig], store_url: str) -> OutputDirectories:
    """The directories that exist, named; one that is not there yet is no problem: its job has not started."""
    return named(
        (found for run in runs for found in _expanded(run)), os.path.realpath(_local(store_url)) if _local(store_url) else ""
    )


def named(found: Iterable[RunConfig], store: str) -> OutputDirectories:
    """Pure: ``found`` paths with names, less those whose name is no run's name, is taken, or that lie in the ``store``, or it in them."""
    owner: dict[str, str] = {}
    kept, problems = [], []
    for run in sorted({(r.path, r.name) for r in found}):
        path, name = run[0], run[1] or Path(run[0]).name
        try:
            run_name(name)
        except ValueError as e:
            problems.append(f"{path}: {e}")
            continue
        if store and (path == store or path.startswith(store.rstrip("/") + "/")):
            problems.append(f"{path}: an output directory inside the store {store}")
        elif store.startswith(path.rstrip("/") + "/"):
            problems.append(f"{path}: the store {store} lies inside this output directory")
        elif name in owner:
            problems.append(f"{path}: its run would be named {name!r} as that of {owner[name]}: give one of them a name")
        else:
            owner[name] = path
            kept.append(RunConfig(path, name))
    return OutputDirectories(tuple(kept), tuple(problems))


def _expanded(run: RunConfig) -> Iterable[RunConfig]:
    """A given path may be a link; what a glob matches may not: whoever can write there would choose what is read."""
    if _MAGIC & set(run.path):
        paths = [Path(path) for path in sorted(glob(run.path)) if not Path(path).is_symlink()]  # noqa: PTH207 - the pattern is absolute
    else:
        paths = [Path(run.path)]
    return [RunConfig(os.path.realpath(path), run.name) for path in paths if path.is_dir()]


def _local(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    return rest if separator and scheme == "file" else "" if separator else url
