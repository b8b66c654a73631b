"""Find the output directories that a configuration names, and the names of their runs.

A configuration names paths and globs, and jobs make directories at any time, so the worker matches
them again before every scan.  A directory that a wildcard matched is left out if other users decide
what lies in it, or if its run's name is not its own.
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
    """The output directories of a configuration, and why others are left out.

    ``runs``: ordered by path; no two have the same name.  ``problems``: why directories are left
    out.  ``unsafe``: the problem of each directory in which other users decide what lies, with
    what to do about it.
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
    """Return the output directories that exist and that a worker may upload from.

    ``unsafe`` has each directory that a wildcard matched and in which other users decide what lies,
    unless a plain path names it, too.  A wildcard's match directly inside another match is left
    out, without a problem, unless it has checkpoints of its own (`_outer_and_inner`).  Nothing that
    matches is no problem: its job has not started yet.  To judge, directories are searched for
    checkpoints, and a file may be created and removed in one.

    Args:
        runs: paths and globs of the configuration.
        store_url: directories inside a store, or around it, become problems.
        coming: directories that count as if they existed.
        as_owner: judge the safety of each directory for its owner, not for this user.

    """
    matches = _matches(runs, coming)
    outer, _ = _outer_and_inner(matches)
    named_paths = {match.run.path for match in matches if not match.wild_dirs}
    unsafe: dict[str, tuple[str, str]] = {}
    for match in (match for match in outer if match.run.path not in named_paths):
        existing = [part for part in match.wild_dirs if _is_directory(part)]
        uid = existing[-1].stat().st_uid if as_owner and existing else os.geteuid()
        for part in existing:
            if refused := _why_not_ours(part, uid):
                why, cure = refused
                other_cure = f"name {match.run.path} itself in worker.runs"
                problem = f"{match.run.path}: left out: {part}: {why}"
                unsafe[match.run.path] = problem, f"{cure}, or {other_cure}"
                break
    names = _with_unique_names(
        (match.run for match in outer if match.run.path not in unsafe), store_url
    )
    return replace(names, unsafe=dict(sorted(unsafe.values())))


def is_matched(runs: Iterable[RunConfig], directory: Path) -> bool:
    """Return whether a path or glob matches a directory, which need not exist.

    Links in ``directory`` are resolved first.  One named as in `checkpoint_dirs.NESTED`, in which
    some trainers keep their checkpoints, matches also if its parent does.
    """
    real = Path(os.path.realpath(directory))
    names = [real, *([real.parent] if real.name in checkpoint_dirs.NESTED else [])]
    return any(_fits(run, name.parts) for run in runs for name in names)


def _fits(run: RunConfig, own_parts: Sequence[str]) -> bool:
    """Return whether a run's path or glob matches a real path, given by its components.

    Links are resolved in the part before the first wildcard.  As in a shell, a wildcard matches no
    name that begins with a dot; none may be a spool.
    """
    parts = Path(run.path).parts
    first = next(iter(_wildcards(parts)), len(parts))
    fixed = Path(os.path.realpath(Path(*parts[:first]))).parts  # a given path may be a link
    wild_names = own_parts[len(fixed) :]
    return (
        tuple(own_parts[: len(fixed)]) == fixed
        and len(wild_names) == len(parts) - first
        and SPOOL not in wild_names
        and all(
            fnmatchcase(name, pattern) and (pattern.startswith(".") or not name.startswith("."))
            for name, pattern in zip(wild_names, parts[first:], strict=True)
        )
    )


def existing_directories(runs: Iterable[RunConfig], store_url: str) -> OutputDirectories:
    """Return the output directories that exist, also those that other users can write to.

    As `output_directories`, with an empty ``unsafe``.
    """
    outer, _ = _outer_and_inner(_matches(runs))
    return _with_unique_names((match.run for match in outer), store_url)


def local_directory(store_url: str) -> str:
    """Return the directory of a store that is a path; empty for a remote one."""
    scheme, separator, path = store_url.partition("://")
    return store_url if not separator else path if scheme == "file" else ""


def list_unmatched(runs: Iterable[RunConfig]) -> tuple[str, ...]:
    """Return a line for each path or glob that matches nothing."""
    return tuple(
        f"worker.runs: no directory {run.path} exists yet" for run in runs if not _matches([run])
    )


def list_watched(runs: Iterable[RunConfig]) -> tuple[str, ...]:
    """Return the existing directories in which a new output directory would appear.

    They are those above each wildcard and above the last component, or the nearest existing ones
    above; also directories inside an output directory whose first checkpoint may appear.
    """

    def nearest(parts: Sequence[str]) -> list[str]:
        """Return the directories that match, else the nearest existing ones above them."""
        existing = [path for path in _glob(parts) if Path(path).is_dir()]
        return existing or (nearest(parts[:-1]) if len(parts) > 1 else [])

    runs, watched = tuple(runs), dict[str, None]()
    for run in runs:
        parts = Path(run.path).parts
        for end in sorted({*_wildcards(parts), len(parts) - 1}):
            watched |= dict.fromkeys(nearest(parts[:end]))
    _, inner = _outer_and_inner(_matches(runs))  # their first checkpoint may appear in these
    return tuple(watched | dict.fromkeys(match.run.path for match in inner))


def _with_unique_names(matched: Iterable[RunConfig], store_url: str) -> OutputDirectories:
    """Return the directories that can be used, ordered by path, and a problem for each that cannot.

    Problems are a name that no run may have, a directory that overlaps the store, and a name that
    an earlier path has.
    """
    local = local_directory(store_url)
    store = os.path.realpath(local) if local else ""
    owner: dict[str, str] = {}
    accepted, problems = [], []
    for path, name in sorted({(run.path, run.name) for run in matched}):
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
            accepted.append(RunConfig(path, name))
    return OutputDirectories(tuple(accepted), tuple(problems))


@dataclass(frozen=True, slots=True)
class _Match:
    """A directory that a path or glob matches, and its run.

    ``wild_dirs``: the directory and those above it, from the first one that a wildcard matched.
    ``ends_wild``: a wildcard matched the last one.
    """

    run: RunConfig
    wild_dirs: tuple[Path, ...]
    ends_wild: bool


def _matches(runs: Iterable[RunConfig], coming: Iterable[Path] = ()) -> list[_Match]:
    """Return the directories that paths or globs match, links resolved, with their runs' names.

    A path without wildcards may be a link.  A directory that a wildcard matched may not, nor one
    above it up to the first wildcard: whoever can write there would choose what is read.  Nor may
    one be a spool.  Without a configured name, a run's name follows from the path alone, so that
    every node computes the same one: the directory's own name, or, if a wildcard stands before the
    last component, all that wildcards matched, joined by ``-``.  ``coming``: directories that count
    as if they existed.
    """
    matches = []
    absent = {Path(os.path.realpath(path)) for path in coming if not _is_directory(path)}
    for run in runs:
        wild = _wildcards(Path(run.path).parts)
        coming_paths = [path for path in absent if _fits(run, path.parts)]
        for path in (*map(Path, _glob(Path(run.path).parts)), *sorted(coming_paths)):
            own_parts = path.parts
            wild_depth = len(own_parts) - wild[0] if wild else 0
            names = own_parts[-wild_depth:] if wild_depth else ()
            if SPOOL in names or any(p.is_symlink() for p in [path, *path.parents][:wild_depth]):
                continue
            if not path.is_dir() and path not in coming_paths:
                continue
            real = path.resolve()
            is_last = wild_depth < 2
            name = run.name or (real.name if is_last else "-".join(own_parts[n] for n in wild))
            wild_dirs = tuple(reversed([real, *real.parents][:wild_depth]))
            matches.append(
                _Match(RunConfig(str(real), name), wild_dirs, wild[-1:] == [len(own_parts) - 1])
            )
    return matches


def _outer_and_inner(matches: Sequence[_Match]) -> tuple[list[_Match], list[_Match]]:
    """Return the output directories, and those matches of a wildcard that lie inside another match.

    Such an inner match is an output directory, too, if a checkpoint or a hook's spool lies in it,
    and it is no part of a checkpoint of the directory above.  (Ray's working directories have
    output directories beside data and logs.)
    """

    @cache
    def list_checkpoint_parts(output_dir: Path) -> frozenset[Path]:
        """Return the directories of checkpoints, and all directories above them."""
        dirs = checkpoint_dirs.find_checkpoint_dirs(output_dir)
        return frozenset(part for each in dirs for part in (each.path, *each.path.parents))

    def is_output_directory(path: Path) -> bool:
        """Return whether an inner match is an output directory of its own."""
        try:
            has_saves = (path / SPOOL).is_dir() or bool(checkpoint_dirs.find_checkpoint_dirs(path))
            return has_saves and path not in list_checkpoint_parts(path.parent)
        except CkptsyncError:
            return True  # a worker there says why it cannot be read

    paths = {match.run.path for match in matches}
    named_paths = {match.run.path for match in matches if not match.ends_wild}
    inner = [
        m
        for m in matches
        if str(Path(m.run.path).parent) in paths and m.run.path not in named_paths
    ]
    outer = [m for m in matches if m not in inner or is_output_directory(Path(m.run.path))]
    return outer, inner


def _why_not_ours(directory: Path, uid: int) -> tuple[str, str] | None:
    """Return why other users than ``uid`` can change a directory, and what to do; None if not.

    The same for a directory that cannot be opened.  If ``uid`` is this process's, a file may be
    created and removed in the directory to find out its owner.
    """
    try:
        fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as e:  # it was removed, or cannot be reached
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
    """Return whether a directory exists that this user can reach; links are followed."""
    try:
        return path.is_dir()
    except OSError:  # this user cannot reach it
        return False


def _wildcards(parts: Sequence[str]) -> list[int]:
    """Return the indexes of the components that are patterns.

    A component whose wildcards are all escaped, as ``glob.escape`` does, is a name.
    """
    return [n for n, part in enumerate(parts) if _MAGIC & set(_ESCAPED.sub("", part))]


def _glob(parts: Sequence[str]) -> list[str]:
    """Return the paths that match, sorted; a path without wildcards as it is, even if absent."""
    path = str(Path(*parts))
    return sorted(glob(path)) if _MAGIC & set(path) else [path]  # noqa: PTH207 - the pattern is absolute
