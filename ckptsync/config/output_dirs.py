"""Find the output directories that a configuration names, and the names of their runs.

The worker calls it before every scan: a glob also matches the directories of jobs that start later.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from glob import glob
from pathlib import Path

from ckptsync import checkpoint_dirs
from ckptsync.config.value_parsers import RunConfig, run_name
from ckptsync.errors import CkptsyncError
from ckptsync.walk import SPOOL, is_open_to_all, is_private_directory

_MAGIC = frozenset("*?[")
_ESCAPED = re.compile(r"\[[*?[]\]")


@dataclass(frozen=True, slots=True)
class OutputDirectories:
    """``runs``: each has a name of its own, ordered by path.

    ``problems``: why others are left out; ``unsafe``: the same of those where other users decide
    what lies there, each with what to do.
    """

    runs: tuple[RunConfig, ...]
    problems: tuple[str, ...]
    unsafe: Mapping[str, str] = field(default_factory=dict)


def output_directories(
    runs: Iterable[RunConfig],
    store_url: str,
    coming: Iterable[Path] = (),
    *,
    as_owner: bool = False,
) -> OutputDirectories:
    """Return the directories that exist and that this user may serve.

    An absent one is no problem: its job has not started.  ``coming``: directories that count as if
    they existed.  ``as_owner``: each is judged for the user whose it is, and not for this one.
    """
    found = _matches(runs, coming)
    outer, _ = _outer_and_inner(found)
    given = {match.run.path for match in found if not match.way}
    unsafe: dict[str, tuple[str, str]] = {}
    for match in (match for match in outer if match.run.path not in given):
        there = [part for part in match.way if _is_directory(part)]
        uid = there[-1].stat().st_uid if as_owner and there else os.geteuid()
        for part in there:
            if refused := _why_not_ours(part, uid):
                why, cure = refused
                named = f"name {match.run.path} itself in worker.runs"
                problem = f"{match.run.path}: left out: {part}: {why}"
                unsafe[match.run.path] = problem, f"{cure}, or {named}"
                break
    names = _named((one.run for one in outer if one.run.path not in unsafe), store_url)
    return replace(names, unsafe=dict(sorted(unsafe.values())))


def is_matched(runs: Iterable[RunConfig], directory: Path) -> bool:
    """Return whether a path or glob matches a directory, which need not exist.

    A wildcard matches no link.  The folder of an output directory in which some trainers keep their
    checkpoints belongs to it.
    """
    real = Path(os.path.realpath(directory))
    names = [real, *([real.parent] if real.name in checkpoint_dirs.NESTED else [])]
    return any(_fits(run, name.parts) for run in runs for name in names)


def _fits(run: RunConfig, own: Sequence[str]) -> bool:
    parts = Path(run.path).parts
    first = next(iter(_wildcards(parts)), len(parts))
    fixed = Path(os.path.realpath(Path(*parts[:first]))).parts  # a given path may be a link
    rest = own[len(fixed) :]
    return (
        tuple(own[: len(fixed)]) == fixed
        and len(rest) == len(parts) - first
        and SPOOL not in rest
        and all(
            fnmatchcase(name, pattern) and (pattern.startswith(".") or not name.startswith("."))
            for name, pattern in zip(rest, parts[first:], strict=True)
        )
    )


def existing_directories(runs: Iterable[RunConfig], store_url: str) -> OutputDirectories:
    """Return the directories that exist, whoever decides what lies there."""
    outer, _ = _outer_and_inner(_matches(runs))
    return _named((match.run for match in outer), store_url)


def local_directory(store_url: str) -> str:
    """Return the directory of a store that is a path; empty for a remote one."""
    scheme, separator, rest = store_url.partition("://")
    return store_url if not separator else rest if scheme == "file" else ""


def list_unmatched(runs: Iterable[RunConfig]) -> tuple[str, ...]:
    """Return a line for each path or glob that matches nothing."""
    return tuple(
        f"worker.runs: no directory {run.path} exists yet" for run in runs if not _matches([run])
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
    _, inner = _outer_and_inner(_matches(runs))  # a first checkpoint may appear in these
    return tuple(found | dict.fromkeys(match.run.path for match in inner))


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
            why = f"its run would be named {name!r} as that of {owner[name]}"
            problems.append(f"{path}: {why}: give one of them a name")
        else:
            owner[name] = path
            kept.append(RunConfig(path, name))
    return OutputDirectories(tuple(kept), tuple(problems))


@dataclass(frozen=True, slots=True)
class _Match:
    """A directory that a path or glob matches, and its run.

    ``way``: the directories from the first one that a wildcard matched. ``ends_wild``: the last
    one is matched by a wildcard.
    """

    run: RunConfig
    way: tuple[Path, ...]
    ends_wild: bool


def _matches(runs: Iterable[RunConfig], coming: Iterable[Path] = ()) -> list[_Match]:
    """Return the directories that paths or globs match, with their runs' names.

    A given path may be a link; what a wildcard matches may not: whoever can write there would
    choose what is read. The name follows from the path alone, so that every node that mounts it
    gives the same one: the directory's own name, or, where wildcards stand before it, what they
    matched (many jobs have an ``out``).
    """
    found = []
    absent = {Path(os.path.realpath(path)) for path in coming if not _is_directory(path)}
    for run in runs:
        wild = _wildcards(Path(run.path).parts)
        to_come = [path for path in absent if _fits(run, path.parts)]
        for path in (*map(Path, _glob(Path(run.path).parts)), *sorted(to_come)):
            own = path.parts
            below = len(own) - wild[0] if wild else 0
            names = own[-below:] if below else ()
            if SPOOL in names or any(p.is_symlink() for p in [path, *path.parents][:below]):
                continue
            if not path.is_dir() and path not in to_come:
                continue
            real = path.resolve()
            is_last = below < 2
            name = run.name or (real.name if is_last else "-".join(own[n] for n in wild))
            way = tuple(reversed([real, *real.parents][:below]))
            found.append(_Match(RunConfig(str(real), name), way, wild[-1:] == [len(own) - 1]))
    return found


def _outer_and_inner(found: Sequence[_Match]) -> tuple[list[_Match], list[_Match]]:
    """Return the output directories, and the matches that lie inside another one.

    A directory inside another one, where a wildcard matched it, is an output directory only once a
    checkpoint or a hook's spool lies in it, unless it belongs to a checkpoint of the directory
    above: Ray's working directories have output directories beside data and logs.
    """

    @cache
    def of_checkpoints(output_dir: Path) -> frozenset[Path]:
        dirs = checkpoint_dirs.find_checkpoint_dirs(output_dir)
        return frozenset(above for one in dirs for above in (one.path, *one.path.parents))

    def is_output_directory(path: Path) -> bool:
        try:
            is_one = (path / SPOOL).is_dir() or bool(checkpoint_dirs.find_checkpoint_dirs(path))
            return is_one and path not in of_checkpoints(path.parent)
        except CkptsyncError:
            return True  # a worker there says why it cannot be read

    paths = {match.run.path for match in found}
    given = {match.run.path for match in found if not match.ends_wild}
    inner = [m for m in found if str(Path(m.run.path).parent) in paths and m.run.path not in given]
    outer = [m for m in found if m not in inner or is_output_directory(Path(m.run.path))]
    return outer, inner


def _why_not_ours(directory: Path, uid: int) -> tuple[str, str] | None:
    """Return why other users decide what lies in a directory of a user's, and what to do."""
    try:
        fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as e:  # it has gone, or may not be reached
        return (e.strerror or str(e)).lower(), "check the directories above it"
    try:
        info = os.fstat(fd)
        is_private = (
            is_private_directory(info, fd)
            if uid == os.geteuid()
            else info.st_uid in (uid, 0) and not is_open_to_all(info)
        )
        if is_private:
            return None
        if info.st_uid in (uid, 0):
            return "others may write there (chmod o-w)", f"chmod o-w {shlex.quote(str(directory))}"
        why = f"it belongs to uid {info.st_uid}, and this is uid {uid}"
        return why, f"run the worker as uid {info.st_uid}"
    finally:
        os.close(fd)


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # this user cannot reach it
        return False


def _wildcards(parts: Sequence[str]) -> list[int]:
    """Return which components are patterns.

    One whose wildcards are all escaped, as ``glob.escape`` does, is a name.
    """
    return [n for n, part in enumerate(parts) if _MAGIC & set(_ESCAPED.sub("", part))]


def _glob(parts: Sequence[str]) -> list[str]:
    path = str(Path(*parts))
    return sorted(glob(path)) if _MAGIC & set(path) else [path]  # noqa: PTH207 - the pattern is absolute
