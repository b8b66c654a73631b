"""Which output directories are there now, and under which run names.

Looked up before every tick: a glob takes in the jobs that start later.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from glob import glob
from pathlib import Path

from ckptsync import scan
from ckptsync.config.readers import RunConfig, run_name
from ckptsync.errors import CkptsyncError
from ckptsync.walk import OURS, is_kept

_MAGIC = frozenset("*?[")
_ESCAPED = re.compile(r"\[[*?[]\]")


@dataclass(frozen=True, slots=True)
class OutputDirectories:
    """``runs``: every one with a name of its own, by path.  ``problems``: why others were left out; ``unsafe``: those of which other users decide."""

    runs: tuple[RunConfig, ...]
    problems: tuple[str, ...]
    unsafe: tuple[str, ...] = ()


def output_directories(runs: Iterable[RunConfig], store_url: str) -> OutputDirectories:
    """The directories that exist, named, and that this user may serve; one that is not there yet is no problem: its job has not started."""
    runs = tuple(runs)
    given = {os.path.realpath(run.path) for run in runs if not _wild(Path(run.path).parts)}
    unsafe = {path: why for run in runs for path, why in _unsafe(run) if path not in given}
    found = _own(runs)
    names = named((one for one in found if one.path not in unsafe), _store(store_url))
    return replace(names, unsafe=tuple(sorted({unsafe[one.path] for one in found if one.path in unsafe})))


def existing_directories(runs: Iterable[RunConfig], store_url: str) -> OutputDirectories:
    """The same, whoever decides what lies there."""
    return named(_own(tuple(runs)), _store(store_url))


def unmatched(runs: Iterable[RunConfig]) -> tuple[str, ...]:
    """A line for each output directory, or pattern of them, of the configuration that is not there: its training has not begun, or it is mistyped."""
    return tuple(f"worker.runs: no directory {run.path} is there yet" for run in runs if not any(True for _ in _expanded(run)))


def _own(runs: Sequence[RunConfig]) -> list[RunConfig]:
    every, inner = _found(runs)
    claimed = cache(_claimed)
    return [found for found in every if found not in inner or _is_own(Path(found.path), claimed)]


def _store(url: str) -> str:
    return os.path.realpath(_local(url)) if _local(url) else ""


def named(found: Iterable[RunConfig], store: str) -> OutputDirectories:
    """Pure: ``found`` paths with names, less those whose name is no run's name, is taken, or that lie in the ``store``, or it in them."""
    owner: dict[str, str] = {}
    kept, problems = [], []
    for path, name in sorted({(r.path, r.name) for r in found}):
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


def places(runs: Iterable[RunConfig]) -> tuple[str, ...]:
    """The directories in which a new output directory would appear: what changes there is worth a look."""
    found: dict[str, None] = {}
    for run in runs:
        parts = Path(run.path).parts
        for end in sorted({*_wild(parts), len(parts) - 1}):
            found |= dict.fromkeys(_nearest(parts[:end]))
    return tuple(found | dict.fromkeys(inside.path for inside in _found(runs)[1]))  # in which a first checkpoint may appear


def _wild(parts: Sequence[str]) -> list[int]:
    """Which components are patterns; one whose wildcards are all escaped, as ``glob.escape`` does, is a name."""
    return [n for n, part in enumerate(parts) if _MAGIC & set(_ESCAPED.sub("", part))]


def _nearest(parts: Sequence[str]) -> list[str]:
    """The directories that match, or if there are none yet, those in which the first missing one would appear."""
    there = [path for path in _matches(parts) if Path(path).is_dir()]
    return there or (_nearest(parts[:-1]) if len(parts) > 1 else [])


def _found(runs: Iterable[RunConfig]) -> tuple[list[RunConfig], Collection[RunConfig]]:
    """Every directory that is there; and those of them that a wildcard at the end found inside another one."""
    found = [(one, _wild(Path(run.path).parts)[-1:] == [len(Path(run.path).parts) - 1]) for run in runs for one in _expanded(run)]
    above, given = {one.path for one, _ in found}, {one.path for one, is_wild in found if not is_wild}
    inner = {one for one, _ in found if one.path not in given and str(Path(one.path).parent) in above}
    return [one for one, is_wild in found if not (is_wild and Path(one.path).name == OURS)], inner


def _is_own(path: Path, claimed: Callable[[Path], frozenset[Path]]) -> bool:
    """Whether a directory inside an output directory is another one, as Ray's working directories have them beside data and logs.

    It is once a checkpoint lies in it, or a hook's spool, unless that is a checkpoint of the directory above.
    """
    try:
        return path not in claimed(path.parent) and ((path / OURS).is_dir() or bool(scan.spots(path)))
    except CkptsyncError:
        return True  # a worker there says why it cannot be looked at


def _claimed(output_dir: Path) -> frozenset[Path]:
    """In which directories its checkpoints lie, and they themselves."""
    return frozenset(above for spot in scan.spots(output_dir) for above in (spot.path, *spot.path.parents))


def _expanded(run: RunConfig) -> Iterable[RunConfig]:
    """A given path may be a link; what a glob matches may not: whoever can write there would choose what is read."""
    parts = Path(run.path).parts
    wild = _wild(parts)
    paths = [path for path in _matches(parts) if not wild or not _has_link(path, wild[0])]
    return [RunConfig(os.path.realpath(path), run.name or _name(path, wild)) for path in paths if Path(path).is_dir()]


def _unsafe(run: RunConfig) -> Iterator[tuple[str, str]]:
    """Directories that a wildcard matches, and of which other users decide what lies there, with the reason."""
    wild = _wild(Path(run.path).parts)
    for found in _expanded(run) if wild else ():
        path = Path(found.path)
        below = len(path.parts) - (len(Path(run.path).parts) - wild[0])  # what stands before the wildcards may have been a link
        for part in reversed([path, *path.parents][: len(path.parts) - below]):
            if why := _of_others(part):
                yield found.path, f"{path}: left out: {part}: {why}"
                break


def _of_others(part: Path) -> str:
    try:
        fd = os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as e:  # it has gone, or may not be reached
        return (e.strerror or str(e)).lower()
    try:
        info = os.fstat(fd)
        if is_kept(info, fd):
            return ""
        is_ours = info.st_uid in (os.geteuid(), 0)
        return (
            "others may write there (chmod o-w)" if is_ours else f"it belongs to uid {info.st_uid}, and this is uid {os.geteuid()}"
        )
    finally:
        os.close(fd)


def _matches(parts: Sequence[str]) -> list[str]:
    path = str(Path(*parts))
    return sorted(glob(path)) if _MAGIC & set(path) else [path]  # noqa: PTH207 - the pattern is absolute


def _has_link(path: str, first: int) -> bool:
    """Whether a component from the ``first`` wildcard on is a link."""
    parts = Path(path).parts
    return any(Path(*parts[: n + 1]).is_symlink() for n in range(first, len(parts)))


def _name(path: str, wild: Sequence[int]) -> str:
    """The directory's own name; if wildcards stand before it, what they matched: of many jobs' ``out``, that tells which.

    It follows from the path alone, so that every node that mounts it gives the same one, whichever other directories are there.
    """
    parts = Path(path).parts
    if not wild or wild[0] == len(parts) - 1:
        return Path(os.path.realpath(path)).name
    return "-".join(parts[n] for n in wild)


def _local(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    return rest if separator and scheme == "file" else "" if separator else url
