"""Merging on local disks: checkpoints in, a directory out that appears by rename, whole or not at all."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptsync.digest import digest_stream
from ckptsync.errors import ConfigError, Corrupt, Incomplete, StoreError
from ckptsync.merge.consolidate import Job, Merged, Progress, carry_out, prepare
from ckptsync.merge.plan import Options
from ckptsync.model import Extent, Files, read
from ckptsync.stores import top
from ckptsync.stores.posix import PosixStore
from ckptsync.stores.tree import LocalFiles, Overlay

# Directories whose parent is the checkpoint, or the run: where configuration and tokenizer may lie.
_INNER = re.compile(r"(checkpoint|step|epoch|iter|global_step|pytorch_model|pytorch_model_fsdp)([-_]?\d+)*|checkpoints")
_PIECE = 4 << 20


@dataclass(frozen=True, slots=True)
class Prepared:
    """A merge that can be done; nothing is written yet."""

    job: Job
    files: Overlay
    trees: tuple[LocalFiles, ...]
    destination: Path


def prepare_local(sources: Sequence[Path], destination: Path, options: Options, config_from: Path | None = None) -> Prepared:
    """Look at everything and plan.  Raises ConfigError, Incomplete, Unsupported or Corrupt."""
    _check_destination(sources, destination)
    trees = tuple(LocalFiles(str(source)) for source in sources)
    files = Overlay(trees)
    config = [*([top.named(str(config_from))] if config_from else []), *_surroundings(sources)]
    job = prepare(files, options, config)
    _check_duplicates(files, job)
    return Prepared(job, files, trees, destination)


def merge_local(
    sources: Sequence[Path],
    destination: Path,
    options: Options,
    config_from: Path | None = None,
    progress: Progress | None = None,
) -> Merged:
    """Consolidate the checkpoint that ``sources`` (one directory a node) are parts of into the new directory ``destination``."""
    return carry_out_local(prepare_local(sources, destination, options, config_from), progress)


def carry_out_local(prepared: Prepared, progress: Progress | None = None) -> Merged:
    """Write it; raises Incomplete if a source changed meanwhile, and then nothing appears."""
    with _appearing(prepared.destination) as work:
        merged = carry_out(prepared.job, prepared.files, PosixStore(str(work)).write, progress)
        changed = [f"{tree.root}/{name}" for tree in prepared.trees for name in tree.changed()]
        if changed:
            raise Incomplete(
                f"{changed[0]}: changed while it was read",
                hint="the checkpoint is still being written: merge again when it is finished",
            )
    return merged


def _check_destination(sources: Sequence[Path], destination: Path) -> None:
    target = destination.resolve()
    if destination.is_symlink() or (destination.exists() and (not destination.is_dir() or any(destination.iterdir()))):
        raise ConfigError(f"{destination}: exists", hint="name a new directory: nothing is ever overwritten")
    for source in sources:
        if target.is_relative_to(source.resolve()):
            raise ConfigError(
                f"{destination}: inside the checkpoint {source}",
                hint="a trainer's directory is never written to: name one beside it",
            )


def _surroundings(sources: Sequence[Path]) -> list[Files]:
    """The checkpoint around an inner directory of shards, and the run around a checkpoint."""
    found: list[Files] = []
    for source in sources:
        place = source.resolve()
        while _INNER.fullmatch(place.name) and place.parent != place:
            place = place.parent
            found.append(top.around(str(place)))
    return found


def _check_duplicates(files: Overlay, job: Job) -> None:
    """A file that several nodes have must be the same on all of them, or they hold different saves."""
    for name in sorted(job.reads):
        holders = files.duplicates(name)
        if len(holders) > 1 and len({_digest(holder, name) for holder in holders}) > 1:
            raise Corrupt(
                f"{name}: differs between the directories given", hint="they hold different saves: give only those of one save"
            )


def _digest(files: Files, name: str) -> str:
    size = files.sizes()[name]
    return digest_stream((read(files, Extent(name, at, min(_PIECE, size - at))) for at in range(0, size, _PIECE)), size).digest


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


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
