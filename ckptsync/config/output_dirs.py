"""Find the output directories that a configuration names, and the names of their runs.

The worker calls it before every scan: a glob also matches the directories of jobs that start later.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from glob import glob
from pathlib import Path

from ckptsync import checkpoint_dirs
from ckptsync.config.readers import RunConfig, run_name
from ckptsync.errors import CkptsyncError
from ckptsync.walk import SPOOL, is_kept

_MAGIC = frozenset("*?[")
_ESCAPED = re.compile(r"\[[*?[]\]")


@dataclass(frozen=True, slots=True)
class OutputDirectories:
    """``runs``: each has a name of its own, ordered by path.

    ``problems``: why others are left out.

    ``unsafe``: a line for each directory that is left out since other users decide what lies there.
    """

    runs: tuple[RunConfig, ...]
    problems: tuple[str, ...]
    unsafe: tuple[str, ...] = ()


def output_directories(runs: Iterable[RunConfig], store_url: str) -> OutputDirectories:
    """Return the directories that exist and that this user may serve.

    An absent one is no problem: its job has not started.
    """
    runs = tuple(runs)
    given = {os.path.realpath(run.path) for run in runs if not _wildcards(Path(run.path).parts)}
    unsafe = {path: why for run in runs for path, why in _unsafe(run) if path not in given}
    found = _existing(runs)
    names = _named((run for run in found if run.path not in unsafe), store_url)
    return replace(
        names, unsafe=tuple(sorted({unsafe[run.path] for run in found if run.path in unsafe}))
    )


def existing_directories(runs: Iterable[RunConfig], store_url: str) -> OutputDirectories:
    """Return the directories that exist, whoever decides what lies there."""
    return _named(_existing(tuple(runs)), store_url)


def local_directory(store_url: str) -> str:
    """Return the directory of a store that is a path; empty for a remote one."""
    scheme, separator, rest = store_url.partition("://")
    return store_url if not separator else rest if scheme == "file" else ""


def list_unmatched(runs: Iterable[RunConfig]) -> tuple[str, ...]:
    """Return a line for each path or glob that matches nothing."""
    return tuple(
        f"worker.runs: no directory {run.path} exists yet" for run in runs if not _expanded(run)
    )


def list_watched(runs: Iterable[RunConfig]) -> tuple[str, ...]:
    """Return the directories to watch: a new output directory would appear in them."""

    def nearest(parts: Sequence[str]) -> list[str]:
        """Return the directories that match, else where the first one would appear."""
        there = [path for path in _glob(parts) if Path(path).is_dir()]
        return there or (nearest(parts[:-1]) if len(parts) > 1 else [])

    runs, found = tuple(runs), dict[str, None]()
    for run in runs:
        parts = Path(run.path).parts
        for end in sorted({*_wildcards(parts), len(parts) - 1}):
            found |= dict.fromkeys(nearest(parts[:end]))
    _, inner = _all_and_inner(runs)  # a first checkpoint may appear in these
    return tuple(found | dict.fromkeys(run.path for run in inner))


def _named(found: Iterable[RunConfig], store_url: str) -> OutputDirectories:
    """Leave out directories without a run's name of their own, or that overlap the store."""
    local = local_directory(store_url)
    store = os.path.realpath(local) if local else ""
    owner: dict[str, str] = {}
    kept, problems = [], []
    for path, name in sorted({(run.path, run.name) for run in found}):
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
            problems.append(
                f"{path}: its run would be named {name!r} as that of {owner[name]}: give one of"
                " them a name"
            )
        else:
            owner[name] = path
            kept.append(RunConfig(path, name))
    return OutputDirectories(tuple(kept), tuple(problems))


def _existing(runs: Sequence[RunConfig]) -> list[RunConfig]:
    """Return the directories that match.

    A directory inside another one only if it is an output directory itself.

    Ray's working directories have output directories beside data and logs.  A directory is one once
    a checkpoint or a hook's spool lies in it, unless it belongs to a checkpoint of the directory
    above.
    """

    @cache
    def of_checkpoints(output_dir: Path) -> frozenset[Path]:
        found_dirs = checkpoint_dirs.find_checkpoint_dirs(output_dir)
        return frozenset(
            above
            for checkpoint_dir in found_dirs
            for above in (checkpoint_dir.path, *checkpoint_dir.path.parents)
        )

    def is_output_directory(path: Path) -> bool:
        try:
            is_one = (path / SPOOL).is_dir() or bool(checkpoint_dirs.find_checkpoint_dirs(path))
            return path not in of_checkpoints(path.parent) and is_one
        except CkptsyncError:
            return True  # a worker there says why it cannot be read

    every, inner = _all_and_inner(runs)
    return [run for run in every if run not in inner or is_output_directory(Path(run.path))]


def _all_and_inner(runs: Sequence[RunConfig]) -> tuple[list[RunConfig], set[RunConfig]]:
    """Return all directories that match, and those that lie inside another one.

    A wildcard at the end matched the inner ones.
    """
    found: list[tuple[RunConfig, bool]] = []
    for run in runs:
        parts = Path(run.path).parts
        ends_wild = _wildcards(parts)[-1:] == [len(parts) - 1]
        found += [(one, ends_wild) for one in _expanded(run)]
    above, given = (
        {one.path for one, _ in found},
        {one.path for one, ends_wild in found if not ends_wild},
    )
    inner = {
        one for one, _ in found if one.path not in given and str(Path(one.path).parent) in above
    }
    return [
        one for one, ends_wild in found if not (ends_wild and Path(one.path).name == SPOOL)
    ], inner


def _expanded(run: RunConfig) -> list[RunConfig]:
    """Return the directories that a path or glob matches, with their runs' names.

    A given path may be a link; what a wildcard matches may not: whoever can write there would
    choose what is read. The name follows from the path alone, so that every node that mounts it
    gives the same one: the directory's own name, or, where wildcards stand before it, what they
    matched (many jobs have an ``out``).
    """
    parts = Path(run.path).parts
    wild = _wildcards(parts)
    found = []
    for path in _glob(parts):
        own = Path(path).parts
        has_link = wild and any(Path(*own[: n + 1]).is_symlink() for n in range(wild[0], len(own)))
        if has_link or not Path(path).is_dir():
            continue
        real = os.path.realpath(path)
        is_last = not wild or wild[0] == len(own) - 1
        name = Path(real).name if is_last else "-".join(own[n] for n in wild)
        found.append(RunConfig(real, run.name or name))
    return found


def _unsafe(run: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield directories in which other users decide what lies there, with the reason.

    Only of those that a wildcard matches.
    """
    pattern = Path(run.path).parts
    wild = _wildcards(pattern)
    for found in _expanded(run) if wild else ():
        path = Path(found.path)
        # components; what stands before the wildcards may have been a link
        below = len(pattern) - wild[0]
        for part in reversed([path, *path.parents][:below]):
            if why := _why_not_ours(part):
                yield found.path, f"{path}: left out: {part}: {why}"
                break


def _why_not_ours(directory: Path) -> str:
    try:
        fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as e:  # it has gone, or may not be reached
        return (e.strerror or str(e)).lower()
    try:
        info = os.fstat(fd)
        if is_kept(info, fd):
            return ""
        if info.st_uid in (os.geteuid(), 0):
            return "others may write there (chmod o-w)"
        return f"it belongs to uid {info.st_uid}, and this is uid {os.geteuid()}"
    finally:
        os.close(fd)


def _wildcards(parts: Sequence[str]) -> list[int]:
    """Return which components are patterns.

    One whose wildcards are all escaped, as ``glob.escape`` does, is a name.
    """
    return [n for n, part in enumerate(parts) if _MAGIC & set(_ESCAPED.sub("", part))]


def _glob(parts: Sequence[str]) -> list[str]:
    path = str(Path(*parts))
    return sorted(glob(path)) if _MAGIC & set(path) else [path]  # noqa: PTH207 - the pattern is absolute
