"""The commands as typed functions, for programs: they return dataclasses, and raise errors.

A program should not have to start a command and read its output.  Each function calls the same
packages as the command of its name, and raises `ckptsync.errors`.  ``import ckptsync`` offers them,
too: `ckptsync.merge` is `ckptsync.api.merge`.

A place is a path or a URL.  ``options`` are those of a store's client, as in ``store.options`` of a
configuration; access keys are found as the commands find them.  ``progress`` is called with the
bytes that are done and the bytes in all, 0 while that is not known.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ckptsync.catalogue.cached import read_catalogue
from ckptsync.catalogue.location_summary import Summary, by_age
from ckptsync.catalogue.uncached import not_found
from ckptsync.config.loading import options_for
from ckptsync.downloader.download import Download
from ckptsync.downloader.find import PullRequest, check_outside, find
from ckptsync.errors import ConfigError, Corrupt
from ckptsync.merger.destination import check_free
from ckptsync.merger.destination import merge as write_merge
from ckptsync.merger.inputs import (
    MergeRequest,
    check_unchanged,
    open_sources,
    show_path,
    usual_threads,
)
from ckptsync.merger.inspection import Inspection, inspect_checkpoint
from ckptsync.merger.into_base import AS_BASE, open_into_base
from ckptsync.merger.model_differences import (
    Difference,
    Side,
    compare_tensors,
    planned_side,
    read_changes,
)
from ckptsync.merger.plan import SHARD_SIZE, DType, MergeOptions, MergeResources, check_dtype
from ckptsync.merger.readers import open_reader
from ckptsync.quantities import parse_size
from ckptsync.records.model_record import ModelFile
from ckptsync.records.report import Level, Report, checked_level
from ckptsync.stores import path_or_url
from ckptsync.stores.checkpoint_files import FileTree, Overlay
from ckptsync.stores.contract import Store
from ckptsync.stores.opening import Access, create_store, open_store
from ckptsync.stores.path_or_url import PathOrUrl
from ckptsync.stores.urls import located
from ckptsync.verifier.tracked_files import ReadCounter
from ckptsync.verifier.verification import InStore, VerifyOptions, resolve_target
from ckptsync.verifier.verification import verify as read_and_verify
from ckptsync.verifier.write_reports import write_report
from ckptsync.worker.file_selection import Selection
from ckptsync.worker.node_identity import node_id
from ckptsync.worker.options import checked_run
from ckptsync.worker.push import find_offer, plan_push
from ckptsync.worker.push import push as send
from ckptsync.worker.results import UploadProgress

Place = str | os.PathLike[str]
Progress = Callable[[int, int], None]
Send = Literal["all", "no-optimizer", "weights"]


@dataclass(frozen=True, slots=True)
class MergedModel:
    """A model that `merge` wrote: its files, its counts of tensors and bytes, notes for people."""

    destination: str
    source: str
    files: tuple[ModelFile, ...]
    tensors: int
    bytes: int
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PulledCheckpoint:
    """A checkpoint that `pull` downloaded to ``directory``, with its status in the store."""

    run: str
    location: str
    status: str
    directory: Path
    files: int
    bytes: int
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A checkpoint of a store, as `ckptsync ls` lists it.

    ``evidence``: why its ``status`` is no better.  ``model``, ``resume``: whether the store has all
    files that a model needs, or that a training needs to resume.  ``bytes``: the size of the
    trainer's files when all are uploaded, or of those stored if no node says it.
    """

    run: str
    checkpoint: str
    location: str
    step: int | None
    status: str
    evidence: tuple[str, ...]
    nodes: tuple[str, ...]
    model: bool
    resume: bool
    bytes: int


def merge(
    sources: Place | Sequence[Place],
    destination: Place,
    *,
    dtype: DType = "auto",
    max_shard_size: int | str | None = None,
    source: str | None = None,
    config_from: Place | None = None,
    base: Place | None = None,
    fill_from: Place | None = None,
    names_of: Place | None = None,
    into: Place | None = None,
    changed_base: bool = False,
    allow_code: bool = False,
    jobs: int | None = None,
    options: Mapping[str, object] | None = None,
    progress: Progress | None = None,
) -> MergedModel:
    """Merge a checkpoint into safetensors, as ``ckptsync merge``; return what was written.

    Args:
        sources: the checkpoint; several where each node wrote its own part.
        destination: a new directory, which appears whole or not at all; or a URL.
        dtype: auto, keep, bf16, fp16 or fp32.
        max_shard_size: bytes, or a size such as ``"5GB"``; 5GB, or as the files of ``into``.
        source: which weights, where a checkpoint holds several.
        config_from: a directory with the config and tokenizer files.
        base: the model that was trained, to compare with.
        fill_from: the model whose tensors stand for those that the checkpoint does not hold.
        names_of: the model under whose names all is written.
        into: the sources are LoRA adapters, which are summed into this model, in this order.
        changed_base: ``into`` is what the adapter's initialisation left, not the original model.
        allow_code: copy code that lies in the checkpoint.
        jobs: threads; one for each core, at most 8, or 4 where a source is a URL.
        options: of the stores' clients.
        progress: gets bytes done and in all.

    Raises ConfigError, Incomplete, Unsupported, Corrupt, StoreError; ValueError for a text that is
    no size.

    """
    if into and base:
        raise ConfigError("base: with into the base is named already", hint="leave it out")
    if changed_base and not into:
        raise ConfigError("changed_base: no base", hint="name it with into")
    size = AS_BASE if into else SHARD_SIZE
    if max_shard_size is not None:
        size = parse_size(max_shard_size) if isinstance(max_shard_size, str) else max_shard_size
        if size < 1:
            why = f"max_shard_size: {max_shard_size!r} is too small: expected at least one byte"
            raise ConfigError(why)
    merge_options = MergeOptions(check_dtype(dtype), size, source, allow_code)
    access = Access(options or {})
    request = MergeRequest(
        [located(os.fspath(place)) for place in _as_list(sources)],
        located(os.fspath(destination)),
        merge_options,
        _located(config_from),
        base=_located(base),
        fill_from=_located(fill_from),
        names_of=_located(names_of),
        into=_located(into),
        is_changed_base=changed_base,
    )
    check_free(request, access)
    prepared = (open_into_base if into else open_sources)(request, access)
    places = [*request.sources, *([request.into] if request.into else [])]
    resources = MergeResources(jobs or usual_threads(places), tensor_digests=False)
    merged = write_merge(prepared, access, progress, resources)
    return MergedModel(
        show_path(request.destination),
        merged.source,
        merged.files,
        len(merged.tensors),
        sum(file.size for file in merged.files),
        merged.notes,
    )


def inspect(*places: Place, options: Mapping[str, object] | None = None) -> Inspection:
    """Return the layouts, tensors and missing files of a checkpoint, as ``ckptsync inspect``.

    Several ``places`` hold the parts of one save.  Reads headers, metadata, and of tensors that are
    stored twice the bytes that `merge` compares; the result names what is damaged.  Raises
    ConfigError, StoreError; Unsupported or Incomplete if there are no weights; Corrupt if a file
    has two sizes in the places.
    """
    access = Access(options or {})
    trees = [path_or_url.list_tree(located(os.fspath(place)), access) for place in places]
    overlay = Overlay(trees)
    if conflicts := overlay.conflicts():
        raise Corrupt(f"{conflicts[0]}: has another size in each directory")
    return inspect_checkpoint(open_reader(overlay, trees), trees)


def diff(
    a: Place | Sequence[Place],
    b: Place | Sequence[Place],
    *,
    options: Mapping[str, object] | None = None,
) -> tuple[Difference, ...]:
    """Return a difference for each tensor of two checkpoints, models or adapters.

    As ``ckptsync diff``: the tensors that `merge` would write are read and compared, and equal ones
    have the ``state`` "same".  Several places hold the parts of one save.

    Raises ConfigError, Unsupported, Corrupt, StoreError; Incomplete if a part is missing, or a file
    changed meanwhile.
    """
    access = Access(options or {})
    sides: list[Side] = []
    trees: list[FileTree] = []
    for places in (a, b):
        sources = [located(os.fspath(place)) for place in _as_list(places)]
        request = MergeRequest(sources, Path(os.devnull), MergeOptions())
        prepared = open_sources(request, access)
        sides.append(planned_side(prepared.job.plans, prepared.files))
        trees.extend(prepared.trees)
    side_a, side_b = sides
    differences, _ = read_changes(
        side_a, side_b, compare_tensors(side_a, side_b), lambda _size: None
    )
    check_unchanged(trees)
    return differences


def verify(
    place: Place,
    *,
    level: Level | None = None,
    options: Mapping[str, object] | None = None,
    progress: Progress | None = None,
) -> tuple[Report, ...]:
    """Read every byte of a store, a run or checkpoint in it, or a directory; return the reports.

    Damage is no error: a report's ``verdict`` is ok, damaged or incomplete.  Reports with news are
    written to the store, each as soon as its location is read.  ``level``: digest for a store and
    parse for a directory, if None; stat reads no bytes.

    Raises ConfigError if nothing has that name or level, Unsupported, after all other locations,
    for newer records; StoreError.
    """
    target = resolve_target(os.fspath(place), Access(options or {}))
    is_store = isinstance(target, InStore)
    checked = checked_level(level) if level else "digest" if is_store else "parse"
    counter = ReadCounter(progress or (lambda _done, _total: None))
    verify_options = VerifyOptions(checked, time.time(), progress=counter, expect=counter.expect)
    reports = []
    for verified in read_and_verify(target, verify_options):
        reports.append(verified.report)
        if verified.news and isinstance(target, InStore):
            write_report(target.store, verified.news)
    return tuple(reports)


def push(
    directory: Place,
    store: Place,
    *,
    run: str | None = None,
    node: str | None = None,
    name: str = "",
    send_files: Send = "all",
    options: Mapping[str, object] | None = None,
    progress: Progress | None = None,
) -> tuple[UploadProgress, ...]:
    """Upload a checkpoint, or all of an output directory; return the progress of each save.

    Files that the store has already are not uploaded again.  If a save fails, the others are
    uploaded, then its error is raised.

    Args:
        directory: the checkpoint, or the directory that holds checkpoints.
        store: the store; made if it does not exist.
        run: the run's name in the store; by default the output directory's.
        node: this node's id in the store; computed by default.
        name: upload all of ``directory`` as one checkpoint of this name.
        send_files: all; no-optimizer; weights.
        options: of the store's client.
        progress: gets bytes done and in all.

    Raises ConfigError, Incomplete (it is being written), Corrupt, StoreError.

    """
    url, path = os.fspath(store), Path(directory)
    offer = find_offer(path, (), name, url)
    offer = replace(offer, run=checked_run(run or offer.run))
    sending_node, selection = node or node_id(), Selection(send_files)
    total = sum(save.size for save in plan_push(offer, sending_node, selection)) if progress else 0
    done = 0

    def add(size: int) -> None:
        """Count the bytes of a chunk, less than 0 for one that is read again; report the sum."""
        nonlocal done
        done += size
        if progress:
            progress(max(0, min(done, total)), total)

    opened = create_store(url, options_for(url, options or {}))
    return send(offer, opened, sending_node, add, selection=selection)


def pull(
    target: str,
    destination: Place,
    store: Place,
    *,
    node: str = "",
    consolidated: bool = False,
    unverified: bool = False,
    options: Mapping[str, object] | None = None,
    progress: Progress | None = None,
) -> PulledCheckpoint:
    """Download a checkpoint, or its consolidated model; check every byte, and return where it is.

    Files of an earlier, interrupted call are kept and completed.  ``notes`` of the result also name
    missing files.

    Args:
        target: ``RUN`` (its newest VERIFIED checkpoint) or ``RUN/CHECKPOINT``, of
            which all files must be stored.
        destination: an output directory, in which the checkpoint appears whole or not at all; the
            model's own directory, where ``consolidated``.
        store: the store that has it.
        node: only what that node needs to resume.
        consolidated: download the consolidated model instead.
        unverified: allow ``RUN`` to mean one not VERIFIED, and one that is retired or lacks files.
        options: of the store's client.
        progress: gets bytes done and in all.

    Raises ConfigError, also if another directory has the place or another pull runs; Incomplete,
    StoreError; Corrupt if a file is damaged; Corrupt or Unsupported if a record cannot be read.

    """
    opened, directory = _open_store(store, options), Path(destination).absolute()
    check_outside(opened, directory)
    trust: Literal["any", "verified"] = "any" if unverified else "verified"
    chosen = find(opened, PullRequest(target, trust, node, consolidated))
    download = Download(directory, chosen.plan)
    if consolidated:
        download = Download(directory.parent, replace(chosen.plan, name=directory.name))
    done = download.run(opened, progress)
    for error in done.failed.values():
        raise error
    return PulledCheckpoint(
        chosen.run,
        chosen.location,
        chosen.status,
        done.directory,
        done.files,
        done.size,
        (*chosen.plan.notes, *chosen.plan.missing),
    )


def list_checkpoints(
    store: Place, run: str = "", *, options: Mapping[str, object] | None = None
) -> tuple[StoredCheckpoint, ...]:
    """Return the checkpoints of a store, or of one ``run``: by run, the oldest first.

    () for an empty store.  Raises ConfigError if there is no such store or run, StoreError; Corrupt
    or Unsupported if any record read for this cannot be read.
    """
    return tuple(
        _stored_checkpoint(summary) for summary in _read_summaries(_open_store(store, options), run)
    )


def resume_step(
    store: Place,
    run: str,
    *,
    trust: Literal["verified", "complete"] = "verified",
    options: Mapping[str, object] | None = None,
) -> int | None:
    """Return the greatest step that a training can resume from; None without such a checkpoint.

    None also if the store has no such run.  ``trust``: "verified", or "complete" for checkpoints
    whose files are all in the store and were not read again.  Raises ConfigError if there is no
    such store, StoreError; Corrupt or Unsupported if a record of the run cannot be read.
    """
    opened = _open_store(store, options)
    try:
        summaries = _read_summaries(opened, run)
    except ConfigError:
        return None  # the run has no checkpoint yet
    statuses = {"VERIFIED"} if trust == "verified" else {"COMPLETE", "CONSOLIDATED", "VERIFIED"}
    whole = [s for s in summaries if s.resume and s.status in statuses and s.step is not None]
    return max((s.step for s in whole if s.step is not None), default=None)


def _located(place: Place | None) -> PathOrUrl | None:
    """Return a place as path or URL; None without one.  Raises ConfigError if it is neither."""
    return located(os.fspath(place)) if place else None


def _as_list(places: Place | Sequence[Place]) -> Sequence[Place]:
    """Return one place as a list of one, several as they are."""
    return [places] if isinstance(places, (str, os.PathLike)) else places


def _open_store(store: Place, options: Mapping[str, object] | None) -> Store:
    """Return a store that exists, opened by its path or URL.  Raises as `open_store`."""
    url = os.fspath(store)
    return open_store(url, options_for(url, options or {}))


def _read_summaries(store: Store, run: str) -> Sequence[Summary]:
    """Return the locations of a store, or of ``run`` if it is not "": by run, the oldest first.

    Raises the error of the first record that cannot be read, and as `list_checkpoints` does.
    """
    catalogue = read_catalogue(store, run=run)
    for fault in catalogue.faults:
        raise fault.error
    by_run: dict[str, list[Summary]] = {}
    for summary in catalogue.summaries:
        by_run.setdefault(summary.run, []).append(summary)
    if run and run not in by_run:
        raise not_found(store, run)
    chosen = [run] if run else sorted(by_run)
    return [summary for name in chosen for summary in by_age(by_run[name])]


def _stored_checkpoint(summary: Summary) -> StoredCheckpoint:
    """Return a location's summary as this module's type."""
    return StoredCheckpoint(
        summary.run,
        summary.checkpoint,
        summary.location,
        summary.step,
        summary.status,
        summary.evidence,
        summary.nodes,
        summary.model,
        summary.resume,
        summary.whole or summary.size,
    )
