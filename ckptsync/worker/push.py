"""``ckptsync push``: one checkpoint, or every one below a directory, now.

Nothing is waited for, but what changes is not sent.

A push finds the saves that a daemon would see below the directory (`find_offer`), without pinning
them, and judges whether they are finished.
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
    notes_at_sending,
    nothing,
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
    """``root``: the output directory, where a spool may be.

    ``found_dirs``: the checkpoints to send; ``pins``: of the same, whoever made them. ``save``: the
    id of the save, where somebody agreed on one and no mark has it.  ``notes``: what was left out
    of account, and why. ``left_out``: what lies in the directory that was named, and in none of
    them.
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
    """Return the checkpoint ``directory``, or all that a worker finds below it.

    In one of ``runs`` under the names that a worker gives. ``name``: that of the checkpoint in the
    store, where all of ``directory`` is to be one.  A directory that no worker calls a checkpoint
    is one here if a layout reads it; a link that the user names is followed.  Raises ConfigError if
    there is no checkpoint, a store cannot keep its name, or the store at ``url`` lies in one of
    these checkpoints, or they in it.
    """
    if not directory.is_dir():
        hint = "give a checkpoint's directory, or the one that holds checkpoints"
        if directory.is_file():
            command = push_command(directory.parent, url, whole=True)
            hint += f"; the one that holds this file: {command}"
        raise ConfigError(
            f"{directory}: {'not a' if directory.exists() else 'no such'} directory", hint=hint
        )
    here, given = directory.resolve(), Path(os.path.abspath(directory))  # noqa: PTH100  # no link is resolved
    around_here = [r for r in runs if r.path in (here, *here.parents, *given.parents)]
    configured = max(around_here, key=lambda r: len(r.path.parts), default=None)
    own = None if configured else checkpoint_dirs.checkpoint_dir_at(here)
    run = configured or (RunDir(here.name, here) if own is None else _run_of(here))
    found_dirs = (
        (own,)
        if own
        else tuple(
            s
            for s in checkpoint_dirs.find_checkpoint_dirs(run.path)
            if here in (run.path, s.path, *s.path.parents)
        )
    )
    is_watched = configured is not None and configured.path == here and bool(found_dirs)
    one = None if is_watched and not name else _as_one(here, given.name, found_dirs, name, url)
    if one:  # no worker knows it under this name, so that no pin and no mark is of it
        offer = Offer((configured or _run_of(here if own else given)).name, here, (one,))
    elif not found_dirs:
        raise _nothing_in(directory, url)
    else:
        offer = Offer(
            run.name, run.path, found_dirs, left_out=checkpoint_dirs.uncovered(here, found_dirs)
        )
        names = {s.name for s in found_dirs}
        try:
            offer = replace(
                offer, pins=list_pins(run.path, lambda name: here == run.path or name in names)
            )
        except UnsafeSpool as e:  # the checkpoints are what they are
            offer = replace(
                offer, notes=((f"pinned checkpoints in the spool are not uploaded: {e}"),)
            )
    root = local_root(url) if url else None
    if root is not None:
        refuse_overlap(directory, root, [s.path for s in offer.found_dirs if s.only is None])
    return offer


def _as_one(
    here: Path, given: str, found_dirs: Sequence[CheckpointDir], name: str, url: str
) -> CheckpointDir | None:
    """Return all of a directory as one checkpoint, if the user names it so or its files show it.

    What the user names is one, whatever its layout; but not a directory of checkpoints.
    """
    below = [s for s in found_dirs if s.family != FINAL and (s.path != here or s.only is not None)]
    known = next((s for s in found_dirs if s.path == here and s.only is None), None)
    entries = checkpoint_dirs.uncovered(here, ())
    if name:
        _refuse_several(here, name, [s for s in below if s.path != here], url)
    elif known or any(s.family != "deepspeed" for s in below):
        return None
    else:
        has_states = any(
            is_of_states(e) or e == ".metadata" or e.endswith(".distcp") for e in entries
        )
        if not (not found_dirs or has_states or checkpoint_dirs.is_named_like_one(given)):
            return None  # an output directory with a final model, or with DeepSpeed's tags
    one = CheckpointDir(
        name or given, known.family if known else _family(name or given, entries), here
    )
    if not name:
        files = build_local_save("", one, checkpoint_dirs.list_checkpoint(one)).files
        if not registry.sources(files):
            return None
    if not checkpoint_dirs.is_plain_name(one.name):
        hint = (
            "give it a name with --as NAME, such as --as checkpoint-4: letters, digits, '_', '.'"
            " and '-', at most 100"
        )
        raise ConfigError(
            f"{here}: a store cannot keep a checkpoint under the name {one.name!r}", hint=hint
        )
    return one


def _refuse_several(here: Path, name: str, inside: Sequence[CheckpointDir], url: str) -> None:
    """Raise ConfigError where a directory holds checkpoints of which each has a name of its own.

    One of DeepSpeed's tags and what lies beside it are one.
    """
    if len(inside) > 1 or any(s.family != "deepspeed" for s in inside):
        each, one = push_command(here, url), push_command(inside[0].path, url)
        raise ConfigError(
            f"{here}: --as names one checkpoint, but this directory contains {inside[0].name}",
            hint=f"name its directory ({one} --as {name}), or upload each under its own name:"
            f" {each}",
        )


def _family(name: str, entries: Sequence[str]) -> Family:
    """Return whose checkpoint it is, by its name, and else by what lies at its top."""
    found = checkpoint_dirs.family_of(name)
    if found == "deepspeed" or name == FINAL:
        if ".metadata" in entries or any(e.endswith(".distcp") for e in entries):
            return "dcp"
        if TRAINER_STATE in entries:
            return "trainer"
    return found


def _nothing_in(directory: Path, url: str) -> ConfigError:
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


def _run_of(checkpoint: Path) -> RunDir:
    """Return the run that a checkpoint is in, by its path alone."""
    above = checkpoint.parent
    root = above.parent if above.name in checkpoint_dirs.NESTED else above
    return RunDir(root.name, root)


def plan_push(offer: Offer, node: str, selection: Selection) -> list[UploadProgress]:
    """Return of each save the files that would be sent, and those that are left out; send nothing.

    Raises as `push` does.
    """
    found: list[UploadProgress] = []
    for one in offered_saves(offer, node):
        seen = outgoing_save(one, selection)
        files, name = seen.files, seen.checkpoint
        size = sum(s.size for s in files.stats)
        found.append(
            UploadProgress(
                seen.run,
                name,
                0,
                "waiting",
                "",
                files=len(files.stats),
                size=size,
                left_out=files.left_out,
                added=files.found_around,
            )
        )
    return found


def push(
    offer: Offer,
    store: Store,
    node: str,
    after_chunk: AfterChunk = nothing,
    *,
    threads: int = Limits().threads,
    selection: Selection = EVERYTHING,
) -> tuple[UploadProgress, ...]:
    """Send all of an offer; raise the first error after everything else was tried.

    ``after_chunk`` gets the bytes of each chunk that is read, each byte of a file once; a negative
    number where bytes have to be read again. Raises Incomplete (it is being written), Corrupt,
    StoreError.
    """
    # measured once, and only where something is sent
    offset = cache(lambda: measure_offset(store, clock_name(node)))
    view = StoreView(store, node, offer.run, selection, offset)
    surroundings = around(offer)
    results: list[UploadProgress] = []
    errors: list[CkptsyncError] = []
    for one in offered_saves(offer, node):
        to = UploadContext(view, one.checkpoint, after_chunk, threads, output_dir=offer.root)
        try:
            done = _push_save(one, observe(one, surroundings), offer.save, to)
            results.append(replace(done, notes=(*done.notes, *offer.notes)))
        except CkptsyncError as e:
            errors.append(without_frames(e))
    if errors:
        raise errors[0]
    return tuple(results)


def _push_save(
    seen: LocalSave, observation: Observation, save: str, to: UploadContext
) -> UploadProgress:
    """Send one save, unless it is being written.

    A user may know more than its files, but not what no waiting makes good.  ``save``: the id of
    the save, where the ranks' markers have none.
    """
    found = judge(observation, 0.0, NOW)
    if not found.finished:
        raise Incomplete(
            f"{seen.checkpoint_dir.path}: {found.reason}",
            hint="push it when the trainer is done with it",
        )
    view, name = to.view, seen.checkpoint
    known = view.refresh()
    if broken := known.broken_location(name):
        raise broken
    if view.is_given_up(seen, EVERYTHING):
        return UploadProgress(seen.run, name, 0, "retired", "given up in the store")
    manifests = known.manifests(name)
    going = outgoing_save(
        seen,
        view.selection,
        lambda files: configs_to_send(files, seen.checkpoint_dir, to.node, manifests),
    )
    done = _send(going, observation.save or save, to)
    if added := send_missing_config(seen, done.location, to, to.read().manifests, young=0.0):
        done = replace(
            done,
            files=done.files + len(added),
            notes=(*done.notes, f"added to what was stored before: {', '.join(added)}"),
        )
    # a daemon, too, would only see to it that nothing moves
    is_proven = judge(observation, 0.0, _PROVEN).finished
    # another node would not have stored its part before its end
    if not done.files or is_proven or view.has_other_part(seen):
        return done
    return replace(done, notes=(*done.notes, f"{ASSUMED}: {found.reason}"))


def _send(seen: LocalSave, save: str, to: UploadContext) -> UploadProgress:
    """Send one save, and note in its pin what a worker would."""
    node, name = to.node, seen.checkpoint
    noted = notes_at_sending(seen, now := time.time_ns(), save)
    noted = replace(noted, finished=noted.finished or now)
    ours = seen.pin if seen.pin is not None and seen.pin.node in ("", node) else None
    if ours is not None and not to.view.find_save(seen.files.stats, name, EVERYTHING):
        with contextlib.suppress(CkptsyncError):  # a disk that is full or not ours
            noted = write_pin_notes(ours, noted)
    sent = send_save(seen, noted, to, ReadFiles())
    if ours is not None:
        with contextlib.suppress(CkptsyncError):  # who waits for it asks a worker, too
            mark_stored(ours)
    progress = sent_progress(seen, sent)
    is_doubtful = not to.store.is_exclusive and to.read().is_contended
    return replace(progress, notes=(*progress.notes, UNCLAIMED)) if is_doubtful else progress


def offered_saves(offer: Offer, *nodes: str) -> list[LocalSave]:
    """Return the saves of an offer: those in the trainer's directory, and those only in a pin.

    What rotation has removed of one that the hook committed is read from the pin.  A save that the
    trainer has removed, or written over, is whole if the hook committed it, or a daemon saw it at
    rest in time.  What another node's daemon pinned on a shared disk is its own to send; ``nodes``
    are ours.
    """
    saves: list[LocalSave] = []
    found = {one.name: checkpoint_dirs.list_checkpoint(one) for one in offer.found_dirs}
    for checkpoint_dir in offer.found_dirs:
        pin, source = None, found[checkpoint_dir.name]
        for one in (p for p in offer.pins if p.checkpoint == checkpoint_dir.name):
            relation = compare(one.files, source.files)
            if not (relation.changed or relation.new) and (
                one.is_committed or not relation.vanished
            ):
                pin = one
        is_short = pin is not None and len(pin.files) > len(source.files)
        seen = build_local_save(offer.run, checkpoint_dir, source, pin if is_short else None)
        saves.append(replace(seen, pin=pin))
    for pin in (p for p in offer.pins if p.node in ("", *nodes) and not p.stored and p.files):
        name, at = pin.checkpoint, found.get(pin.checkpoint)
        is_gone = at is None or not at.files or bool(compare(pin.files, at.files).changed)
        if is_gone and (pin.is_committed or pin.notes.stable):
            family = checkpoint_dirs.family_of(name)
            where = CheckpointDir(name, family, offer.root / name)
            saves.append(build_local_save(offer.run, where, None, pin))
    return saves


def around(offer: Offer) -> Surroundings:
    """Return what lies in the same output directory, as far as it can be read."""
    seen: list[LocalSave] = []
    # what cannot be read proves nothing of the rest, and pushing it reports why
    with contextlib.suppress(CkptsyncError):
        for one in checkpoint_dirs.find_checkpoint_dirs(offer.root):
            seen.append(build_local_save(offer.run, one, checkpoint_dirs.list_checkpoint(one)))  # noqa: PERF401 - what was read before an error stays
    marked = {*(s.name for s in offer.found_dirs), *(p.checkpoint for p in offer.pins)}
    return replace(find_surroundings(offer.root, seen, marked), awaited=False)
