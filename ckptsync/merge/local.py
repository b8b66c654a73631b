"""Merging on local disks: checkpoints in, a directory out that appears by rename, whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckptsync.errors import ConfigError, Corrupt, Incomplete, StoreError
from ckptsync.merge.consolidate import Chunk, Merged, Progress, Write, carry_out
from ckptsync.merge.copying import Work
from ckptsync.merge.dated import check_dates
from ckptsync.merge.one_save import Judge, check_duplicates, check_saves, check_steps, remarks
from ckptsync.merge.plan import Options
from ckptsync.merge.prepare import Job, prepare
from ckptsync.model import Extent, Files, read
from ckptsync.stores import top
from ckptsync.stores.posix import PosixStore
from ckptsync.stores.tree import LocalFiles, Overlay

# Directories whose parent is the checkpoint, or the run: where configuration and tokenizer may lie.
_INNER = re.compile(r"(checkpoint|step|epoch|iter|global_step|pytorch_model|pytorch_model_fsdp)([-_]?\d+)*|checkpoints")
_PIECE = 4 << 20
_LARGE_JSON = 1 << 20


@dataclass(frozen=True, slots=True)
class Prepared:
    """A merge that can be done; nothing is written yet."""

    job: Job
    files: Overlay
    trees: tuple[LocalFiles, ...]
    destination: Path


def prepare_local(
    sources: Sequence[Path],
    destination: Path,
    options: Options,
    config_from: Path | None = None,
    base: Path | None = None,
    *,
    judge: Judge = check_dates,
) -> Prepared:
    """Look at everything, the files' times too (``judge``), and plan.  Raises ConfigError, Incomplete, Unsupported or Corrupt."""
    _check_destination(sources, destination)
    check_steps([_real(source) for source in sources])
    trees = tuple(LocalFiles(str(source)) for source in sources)
    files = Overlay(trees)
    named = [(str(config_from), top.named(str(config_from)))] if config_from else []
    config = [*named, *_surroundings(sources)]
    compared = top.named(str(base)) if base else None
    job = prepare(files, options, [place for _, place in config], compared)
    origins = [*config, *([(str(base), compared)] if compared else [])]
    job = replace(job, notes=(*job.notes, *_origins(job, origins), *remarks(trees, job)))
    check_duplicates(files, job)
    check_saves(trees, job, judge)
    for name, place in job.beside:
        _check_beside(place, name)
    return Prepared(job, files, trees, destination)


def merge_local(
    sources: Sequence[Path],
    destination: Path,
    options: Options,
    config_from: Path | None = None,
    progress: Progress | None = None,
    *,
    work: Work | None = None,
) -> Merged:
    """Consolidate the checkpoint that ``sources`` (one directory a node) are parts of into the new directory ``destination``."""
    return carry_out_local(prepare_local(sources, destination, options, config_from), progress, work)


def carry_out_local(prepared: Prepared, progress: Progress | None = None, work: Work | None = None) -> Merged:
    """Write it; raises Incomplete if a source changed meanwhile, and then nothing appears."""
    with _appearing(prepared.destination) as directory:
        merged = carry_out(prepared.job, prepared.files, _writing(directory, prepared.destination), progress, work)
        changed = [f"{tree.root}/{name}" for tree in prepared.trees for name in tree.changed()]
        if changed:
            raise Incomplete(
                f"{changed[0]}: changed while it was read",
                hint="the checkpoint is still being written: merge again when it is finished",
            )
    return merged


def _check_destination(sources: Sequence[Path], destination: Path) -> None:
    target = _real(destination)
    if destination.is_symlink() or (destination.exists() and (not destination.is_dir() or any(destination.iterdir()))):
        raise ConfigError(f"{destination}: exists", hint="name a new directory: nothing is ever overwritten")
    for source in sources:
        if target.is_relative_to(_real(source)):
            raise ConfigError(
                f"{destination}: inside the checkpoint {source}",
                hint="a trainer's directory is never written to: name one beside it",
            )


def _real(path: Path) -> Path:
    """Without links.  `Path.resolve` raises RuntimeError on a link to itself before Python 3.13; whoever opens it says it better."""
    return Path(os.path.realpath(path))


def _surroundings(sources: Sequence[Path]) -> list[tuple[str, Files]]:
    """The checkpoint around an inner directory of shards, and the run around a checkpoint: where it is, and its files."""
    found: list[tuple[str, Files]] = []
    for source in sources:
        place = _real(source)
        while _INNER.fullmatch(place.name) and place.parent != place:
            place = place.parent
            found.append((str(place), top.around(str(place))))
    return found


def _origins(job: Job, places: Sequence[tuple[str, Files]]) -> Iterator[str]:
    """Where the files beside the weights come from, if not from the checkpoint itself."""
    for path, place in places:
        if names := [name for name, found in job.beside if found is place]:
            yield f"from {path}: {', '.join(names)}"


def _check_beside(place: Files, name: str) -> None:
    """A model beside a damaged configuration cannot be opened; large files (tokenizers) are only looked at where they end."""
    size = place.sizes()[name]
    if not name.endswith(".json"):
        return
    is_large = size > _LARGE_JSON
    data = read(place, Extent(name, size - 64, 64) if is_large else Extent(name, 0, size))
    try:
        if is_large and not data.rstrip().endswith((b"}", b"]")):
            raise ValueError("no end")  # noqa: TRY301  as json would say of all of it
        if not is_large:
            json.loads(data)
    except (ValueError, RecursionError) as e:
        hint = "fetch it again; or take it away and name the directory of another with --config-from"
        raise Corrupt(f"{name}: is no JSON: {e}", hint=hint) from e


@contextlib.contextmanager
def _appearing(destination: Path) -> Iterator[Path]:
    """A directory to work in, beside ``destination``, that becomes it at the end or leaves nothing."""
    work = destination.parent / f".{destination.name}.ckptsync-{secrets.token_hex(4)}"
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        work.mkdir()
        try:
            yield work
            work.rename(destination)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
        _sync(destination.parent)
    except OSError as e:
        raise StoreError(f"{destination}: {(e.strerror or str(e)).lower()}", hint="is there room, and permission to write?") from e


def _writing(work: Path, destination: Path) -> Write:
    """Writes below ``work``; a full disk is said of ``destination``, which is what the operator knows."""
    store = PosixStore(str(work))

    def write(name: str, chunks: Iterable[Chunk]) -> None:
        try:
            store.write(name, chunks)
        except StoreError as e:
            if not isinstance(e.__cause__, OSError) or e.__cause__.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise StoreError(
                f"{destination}/{e}", hint="make room, or name a directory elsewhere; nothing was left behind"
            ) from e.__cause__

    return write


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
