"""``ckptsync push``: upload one checkpoint, or every one below a directory, now.

A push must not wait for minutes as a worker does, and must not upload half a save.  It finds the
saves that a worker would find below the directory (`find_offer`), without pinning them, judges each
by its files alone with no waiting times, and sends those that do not change (`push`).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from ckptsync import checkpoint_dirs
from ckptsync.checkpoint_dirs import FINAL, CheckpointDir, Family
from ckptsync.errors import CkptsyncError, ConfigError, Incomplete, without_frames
from ckptsync.layouts import registry
from ckptsync.records.store_paths import clock_name
from ckptsync.spool.pins import Pin, compare, list_pins, mark_stored, write_pin_notes
from ckptsync.stores.clock import measure_offset
from ckptsync.stores.contract import Store
from ckptsync.stores.limits import Limits
from ckptsync.walk import UnsafeSpool
from ckptsync.worker.file_selection import EVERYTHING, Selection, is_of_states
from ckptsync.worker.finished import Rule, judge
from ckptsync.worker.local_save import (
    AfterChunk,
    LocalSave,
    ReadFiles,
    build_local_save,
    ignore_chunk,
    notes_at_sending,
)
from ckptsync.worker.model_configs import configs_to_send, outgoing_save, send_missing_config
from ckptsync.worker.observation import Observation, Surroundings, find_surroundings, observe
from ckptsync.worker.options import RunDir, local_root, push_command, refuse_overlap
from ckptsync.worker.results import UploadProgress
from ckptsync.worker.store_view import StoreView
from ckptsync.worker.torn_saves import TRAINER_STATE
from ckptsync.worker.upload import UploadContext, send_save, sent_progress

UNCLAIMED = (
    "another node is uploading this checkpoint, and on this store the two nodes could overwrite"
    " each other's files: push again when that node is done"
)
ASSUMED = "may be incomplete, uploaded because you named it"
NOW = Rule(quiet=0, unmarked=0, doubtful=0)
_PROVEN = Rule(quiet=0, unmarked=1, doubtful=1)


@dataclass(frozen=True, slots=True)
class Offer:
    """What a push sends.

    ``root``: the output directory, where a spool may be.  ``found_dirs``: the checkpoints to send.
    ``pins``: of these checkpoints, of any node.  ``save``: the save's id, for callers that have
    agreed on one.  ``notes``: what was ignored, and why.  ``left_out``: entries of the named
    directory that are in no checkpoint.
    """

    run: str
    root: Path
    found_dirs: tuple[CheckpointDir, ...]
    pins: tuple[Pin, ...] = ()
    save: str = ""
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


def find_offer(
    directory: Path, runs: Iterable[RunDir] = (), name: str = "", url: str = ""
) -> Offer:
    """Return the checkpoint ``directory``, or all checkpoints that a worker finds below it.

    Runs have the names that a worker gives them.  A directory that no worker calls a checkpoint is
    one if a layout reads it.  A link that the user names is followed.

    Args:
        directory: what the user names.
        runs: configured runs.
        name: the checkpoint's name in the store; then all of ``directory`` is one checkpoint.
        url: the store's, for checks and advice.

    Raises:
        ConfigError: there is no checkpoint, the store cannot keep its name, or the store and a
            checkpoint lie in each other.

    """
    resolved, absolute = _resolve(directory, url)
    around_here = [r for r in runs if r.path in (resolved, *resolved.parents, *absolute.parents)]
    configured = max(around_here, key=lambda r: len(r.path.parts), default=None)
    single_dir = None if configured else checkpoint_dirs.checkpoint_dir_at(resolved)
    run = configured or (
        RunDir(resolved.name, resolved) if single_dir is None else _run_by_path(resolved)
    )
    found_dirs = (single_dir,) if single_dir else _find_below(resolved, run)
    is_watched = configured is not None and configured.path == resolved and bool(found_dirs)
    checkpoint_dir = (
        None
        if is_watched and not name
        else _find_named(resolved, absolute.name, found_dirs, name, url)
    )
    if checkpoint_dir:  # no worker knows it under this name, so that no pin and no mark is of it
        run_name = (configured or _run_by_path(resolved if single_dir else absolute)).name
        offer = Offer(run_name, resolved, (checkpoint_dir,))
    elif found_dirs:
        offer = _offer_with_pins(resolved, run, found_dirs)
    else:
        raise _no_checkpoint_error(directory, url)
    root = local_root(url) if url else None
    if root is not None:
        refuse_overlap(directory, root, [s.path for s in offer.found_dirs if s.only is None])
    return offer


def _resolve(directory: Path, url: str) -> tuple[Path, Path]:
    """Return a directory's path with all links resolved, and its absolute path with none.

    Raises ConfigError, with a command as advice, if it is no directory.
    """
    if not directory.is_dir():
        hint = "give a checkpoint's directory, or the one that holds checkpoints"
        if directory.is_file():
            command = push_command(directory.parent, url, whole=True)
            hint += f"; the one that holds this file: {command}"
        raise ConfigError(
            f"{directory}: {'not a' if directory.exists() else 'no such'} directory", hint=hint
        )
    return directory.resolve(), Path(os.path.abspath(directory))  # noqa: PTH100  # no link is resolved


def _find_below(resolved: Path, run: RunDir) -> tuple[CheckpointDir, ...]:
    """Return the checkpoints that a worker of ``run`` finds at ``resolved`` and below it."""
    return tuple(
        s
        for s in checkpoint_dirs.find_checkpoint_dirs(run.path)
        if resolved in (run.path, s.path, *s.path.parents)
    )


def _offer_with_pins(resolved: Path, run: RunDir, found_dirs: tuple[CheckpointDir, ...]) -> Offer:
    """Return the offer of a run's checkpoints, with their pins, or all pins for the whole run.

    If the spool is unsafe, the offer has no pins, and a note says so.
    """
    offer = Offer(
        run.name, run.path, found_dirs, left_out=checkpoint_dirs.uncovered(resolved, found_dirs)
    )
    names = {s.name for s in found_dirs}
    try:
        pins = list_pins(run.path, lambda name: resolved == run.path or name in names)
    except UnsafeSpool as e:  # the checkpoints are what they are
        return replace(offer, notes=(f"pinned checkpoints in the spool are not uploaded: {e}",))
    return replace(offer, pins=pins)


def _find_named(
    resolved: Path, given_name: str, found_dirs: Sequence[CheckpointDir], name: str, url: str
) -> CheckpointDir | None:
    """Return all of a directory as one checkpoint, if the user names it so or its files show it.

    None for a directory of checkpoints.  Raises ConfigError for a name that a store cannot keep, or
    if a directory of checkpoints gets a name.
    """
    below = [
        s for s in found_dirs if s.family != FINAL and (s.path != resolved or s.only is not None)
    ]
    whole_dir = next((s for s in found_dirs if s.path == resolved and s.only is None), None)
    entries = checkpoint_dirs.uncovered(resolved, ())
    if name:
        _refuse_several(resolved, name, [s for s in below if s.path != resolved], url)
    elif whole_dir or any(s.family != "deepspeed" for s in below):
        return None
    else:
        has_states = any(
            is_of_states(e) or e == ".metadata" or e.endswith(".distcp") for e in entries
        )
        if not (not found_dirs or has_states or checkpoint_dirs.is_named_like_one(given_name)):
            return None  # an output directory with a final model, or with DeepSpeed's tags
    checkpoint_dir = CheckpointDir(
        name or given_name,
        whole_dir.family if whole_dir else _guess_family(name or given_name, entries),
        resolved,
    )
    if not name:
        files = build_local_save(
            "", checkpoint_dir, checkpoint_dirs.list_checkpoint(checkpoint_dir)
        ).files
        if not registry.sources(files):
            return None
    if not checkpoint_dirs.is_plain_name(checkpoint_dir.name):
        hint = (
            "give it a name with --as NAME, such as --as checkpoint-4: letters, digits, '_', '.'"
            " and '-', at most 100"
        )
        raise ConfigError(
            f"{resolved}: a store cannot keep a checkpoint under the name {checkpoint_dir.name!r}",
            hint=hint,
        )
    return checkpoint_dir


def _refuse_several(
    directory: Path, name: str, inner_dirs: Sequence[CheckpointDir], url: str
) -> None:
    """Raise ConfigError if a directory that gets one name contains checkpoints with own names.

    One of DeepSpeed's tags counts as one checkpoint with what lies beside it.
    """
    if len(inner_dirs) > 1 or any(s.family != "deepspeed" for s in inner_dirs):
        push_all, push_first = push_command(directory, url), push_command(inner_dirs[0].path, url)
        raise ConfigError(
            f"{directory}: --as names one checkpoint, but this directory contains"
            f" {inner_dirs[0].name}",
            hint=f"name its directory ({push_first} --as {name}), or upload each under its own"
            f" name: {push_all}",
        )


def _guess_family(name: str, entries: Sequence[str]) -> Family:
    """Return which trainer wrote a checkpoint, by its name.

    Where the name says DeepSpeed or is the final model's, by the entries at its top if they tell.
    """
    family = checkpoint_dirs.family_of(name)
    if family == "deepspeed" or name == FINAL:
        if ".metadata" in entries or any(e.endswith(".distcp") for e in entries):
            return "dcp"
        if TRAINER_STATE in entries:
            return "trainer"
    return family


def _no_checkpoint_error(directory: Path, url: str) -> ConfigError:
    """Return the error for a directory without a checkpoint, with a command that may push it."""
    entries = checkpoint_dirs.uncovered(directory, ())
    links = [directory / name for name in entries if (directory / name).is_symlink()]
    folder = next((link for link in links if link.is_dir()), None)
    if folder:
        hint = f"name the link to follow it: {push_command(folder, url)}"
        return ConfigError(
            f"{directory}: contains no checkpoint, only a link to one: {folder.name}", hint=hint
        )
    hint = (
        "name a directory that `ckptsync inspect` can read, such as checkpoint-N, or the directory"
        " that holds them"
    )
    if entries:
        hint += f"; to upload all of it as it is: {push_command(directory, url, whole=True)}"
    return ConfigError(f"{directory}: no checkpoint in it", hint=hint)


def _run_by_path(checkpoint: Path) -> RunDir:
    """Return the run of a checkpoint, by its path alone."""
    above = checkpoint.parent
    root = above.parent if above.name in checkpoint_dirs.NESTED else above
    return RunDir(root.name, root)


def plan_push(offer: Offer, node: str, selection: Selection) -> list[UploadProgress]:
    """Return the files of each save that would be sent, and those left out; send nothing.

    Raises as `push` does.
    """
    planned: list[UploadProgress] = []
    for local_save in offered_saves(offer, node):
        outgoing = outgoing_save(local_save, selection)
        files, name = outgoing.files, outgoing.checkpoint
        size = sum(s.size for s in files.stats)
        planned.append(
            UploadProgress(
                outgoing.run,
                name,
                0,
                "waiting",
                "",
                files=len(files.stats),
                size=size,
                left_out=files.left_out,
                added=files.files_around,
            )
        )
    return planned


def push(
    offer: Offer,
    store: Store,
    node: str,
    after_chunk: AfterChunk = ignore_chunk,
    *,
    threads: int = Limits().threads,
    selection: Selection = EVERYTHING,
) -> tuple[UploadProgress, ...]:
    """Send all saves of an offer; raise the first error after all others were tried.

    ``after_chunk``: gets the bytes of each chunk, each byte of a file once; a negative number if
    bytes are read again.  Raises Incomplete (a save is being written), Corrupt, StoreError.
    """
    # measured once, and only where something is sent
    offset = cache(lambda: measure_offset(store, clock_name(node)))
    view = StoreView(store, node, offer.run, selection, offset)
    surroundings = find_surroundings_of(offer)
    results: list[UploadProgress] = []
    errors: list[CkptsyncError] = []
    for local_save in offered_saves(offer, node):
        context = UploadContext(
            view, local_save.checkpoint, after_chunk, threads, output_dir=offer.root
        )
        try:
            done = _push_save(local_save, observe(local_save, surroundings), offer.save, context)
            results.append(replace(done, notes=(*done.notes, *offer.notes)))
        except CkptsyncError as e:
            errors.append(without_frames(e))
    if errors:
        raise errors[0]
    return tuple(results)


def _push_save(
    local_save: LocalSave, observation: Observation, save: str, context: UploadContext
) -> UploadProgress:
    """Send one save, unless it is being written or given up.

    A save that was given up in the store is not sent: phase ``retired``.  A configuration that the
    stored save lacks is sent, too.  A user may know that a save is complete although its files do
    not prove it; then the result has a note.  ``save``: the save's id, where the ranks' markers
    have none.  Raises Incomplete for files that cannot be a complete save; the error of records
    that cannot be read; and what `send_save` raises.
    """
    judgement = judge(observation, 0.0, NOW)
    if not judgement.finished:
        raise Incomplete(
            f"{local_save.checkpoint_dir.path}: {judgement.reason}",
            hint="push it when the trainer is done with it",
        )
    view, name = context.view, local_save.checkpoint
    records = view.refresh()
    if broken := records.broken_location(name):
        raise broken
    if view.is_given_up(local_save, EVERYTHING):
        return UploadProgress(local_save.run, name, 0, "retired", "given up in the store")
    manifests = records.manifests(name)
    outgoing = outgoing_save(
        local_save,
        view.selection,
        lambda files: configs_to_send(files, local_save.checkpoint_dir, context.node, manifests),
    )
    done = _send(outgoing, observation.save or save, context)
    if sent_configs := send_missing_config(
        local_save, done.location, context, context.read().manifests, young=0.0
    ):
        done = replace(
            done,
            files=done.files + len(sent_configs),
            notes=(*done.notes, f"added to what was stored before: {', '.join(sent_configs)}"),
        )
    # a daemon, too, would only see to it that nothing moves
    is_proven = judge(observation, 0.0, _PROVEN).finished
    # another node would not have stored its part before its end
    if not done.files or is_proven or view.has_other_part(local_save):
        return done
    return replace(done, notes=(*done.notes, f"{ASSUMED}: {judgement.reason}"))


def _send(local_save: LocalSave, save: str, context: UploadContext) -> UploadProgress:
    """Send one save, and write notes and the stored mark into its pin, as a worker would.

    Another node's pin is left alone; errors of writing a pin are ignored.  The result has a note if
    another node is sending to a store where the two could overwrite each other's files.
    """
    node, name = context.node, local_save.checkpoint
    pin_notes = notes_at_sending(local_save, now := time.time_ns(), save)
    pin_notes = replace(pin_notes, finished=pin_notes.finished or now)
    own_pin = (
        local_save.pin if local_save.pin is not None and local_save.pin.node in ("", node) else None
    )
    if own_pin is not None and not context.view.find_save(local_save.files.stats, name, EVERYTHING):
        with contextlib.suppress(CkptsyncError):  # a disk that is full or not ours
            pin_notes = write_pin_notes(own_pin, pin_notes)
    result = send_save(local_save, pin_notes, context, ReadFiles())
    if own_pin is not None:
        with contextlib.suppress(CkptsyncError):  # who waits for it asks a worker, too
            mark_stored(own_pin)
    progress = sent_progress(local_save, result)
    is_doubtful = not context.store.is_exclusive and context.read().is_contended
    return replace(progress, notes=(*progress.notes, UNCLAIMED)) if is_doubtful else progress


def offered_saves(offer: Offer, *nodes: str) -> list[LocalSave]:
    """Return the saves of an offer: those in the trainer's directory, and those only in a pin.

    Files that rotation has removed from a committed save are read from the pin.  A save that the
    trainer has removed or overwritten counts if the hook committed it, or a worker noted that it
    was stable; but not if its pin has the stored mark.  Pins of other nodes than ``nodes`` are left
    to their owners.  Raises Incomplete or ConfigError for a directory that cannot be listed.
    """
    saves: list[LocalSave] = []
    listings = {
        candidate.name: checkpoint_dirs.list_checkpoint(candidate) for candidate in offer.found_dirs
    }
    for checkpoint_dir in offer.found_dirs:
        pin, source = None, listings[checkpoint_dir.name]
        for candidate in (p for p in offer.pins if p.checkpoint == checkpoint_dir.name):
            relation = compare(candidate.files, source.files)
            if not (relation.changed or relation.new) and (
                candidate.is_committed or not relation.vanished
            ):
                pin = candidate
        is_short = pin is not None and len(pin.files) > len(source.files)
        local_save = build_local_save(offer.run, checkpoint_dir, source, pin if is_short else None)
        saves.append(replace(local_save, pin=pin))
    for pin in (p for p in offer.pins if p.node in ("", *nodes) and not p.stored and p.files):
        name, listing = pin.checkpoint, listings.get(pin.checkpoint)
        is_gone = (
            listing is None or not listing.files or bool(compare(pin.files, listing.files).changed)
        )
        if is_gone and (pin.is_committed or pin.notes.stable):
            family = checkpoint_dirs.family_of(name)
            pinned_dir = CheckpointDir(name, family, offer.root / name)
            saves.append(build_local_save(offer.run, pinned_dir, None, pin))
    return saves


def find_surroundings_of(offer: Offer) -> Surroundings:
    """Return what lies in the offer's output directory, if readable; ``has_trainer`` is False."""
    saves: list[LocalSave] = []
    # what cannot be read proves nothing of the rest, and pushing it reports why
    with contextlib.suppress(CkptsyncError):
        for checkpoint_dir in checkpoint_dirs.find_checkpoint_dirs(offer.root):
            listing = checkpoint_dirs.list_checkpoint(checkpoint_dir)
            saves.append(build_local_save(offer.run, checkpoint_dir, listing))
    marked = {*(s.name for s in offer.found_dirs), *(p.checkpoint for p in offer.pins)}
    return replace(find_surroundings(offer.root, saves, marked), has_trainer=False)
