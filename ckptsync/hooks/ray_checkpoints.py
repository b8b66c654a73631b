"""Checkpoints that a Ray Train loop reports: sent to a store, verified there, and downloaded again.

Ray Train 2.60 demands of a ``checkpoint_upload_fn`` a ``Checkpoint`` in the experiment's directory,
with the same path on every rank (``checkpoint_manager.py``, ``report_handler.py``).  It gets one
that holds a note of a few hundred bytes,
``<storage_path>/<experiment>/<checkpoint>/ckptsync.json``, with the location in the store.  The
files do not go through ``storage_path``.  Ray deletes the note as it deletes checkpoints
(``num_to_keep``); the store has its own retention.

A report returns when this rank's files and its manifest are in the store, and Ray knows the
checkpoint when every rank has reported.  A rank that is killed before leaves no checkpoint, in Ray
or in the store.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ckptsync import checkpoint_dirs
from ckptsync.catalogue.uncached import read_location
from ckptsync.config import loading
from ckptsync.config.loading import from_environment
from ckptsync.digest import digest
from ckptsync.downloader.download import Download
from ckptsync.downloader.download_plan import PullPlan, plan_checkpoint
from ckptsync.errors import ConfigError, Corrupt, Incomplete, StoreError
from ckptsync.records.io import hidden_by
from ckptsync.records.report import DAMAGE, Report, checked_level
from ckptsync.records.store_paths import checked_node
from ckptsync.safe_names import is_ours
from ckptsync.spool.markers import save_id
from ckptsync.stores.contract import Store
from ckptsync.stores.opening import Access, create_store, open_store
from ckptsync.stores.urls import Remote, located
from ckptsync.typed_json import Decoder
from ckptsync.verifier.verification import InStore, VerifyOptions, resolve_target, verify
from ckptsync.verifier.write_reports import write_report
from ckptsync.walk import Listing, walk
from ckptsync.worker.node_identity import node_id
from ckptsync.worker.options import checked_run
from ckptsync.worker.push import ASSUMED, Offer, push
from ckptsync.worker.results import UploadProgress

NOTE = "ckptsync.json"
_log = logging.getLogger("ckptsync.hook")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
# <checkpoint>~<save> for another save of one name
_LOCATION = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.~-]{0,199}")
_RETRY = 1.0  # seconds
_WHOLE, _LOCK = ".whole", "lock"
_SEVERITY = {"ok": 0, "incomplete": 1, "damaged": 2}
# report → hash of its files' names, sizes and times, in this process
_reported: dict[tuple[str, ...], int] = {}


# --- the note that Ray keeps


@dataclass(frozen=True, slots=True)
class Note:
    """Where a checkpoint lies: at ``location`` of ``store``, a path or a URL without a password."""

    store: str
    run: str
    checkpoint: str
    location: str

    @property
    def url(self) -> str:
        """Return the location as a URL, for messages and commands."""
        return f"{self.store}/{self.run}/{self.location}"

    def encode(self) -> bytes:
        """Return the content of the note's file."""
        return json.dumps({"ckptsync": 1, **asdict(self)}, indent=1).encode() + b"\n"


_NOTES = Decoder(Note, "a checkpoint reference that ckptsync wrote", 64 * 1024)


def decode_note(data: bytes, name: str) -> Note:
    """Return the note in ``data``, the content of file ``name``; raise Corrupt for others."""
    note = _NOTES.decode(data, name)
    names = (note.checkpoint, note.location)
    if not (note.store and note.run and all(map(_LOCATION.fullmatch, names))):
        raise Corrupt(f"{name}: not a checkpoint reference that ckptsync wrote")
    return note


def write_note(filesystem: Any, folder: str, note: Note) -> None:
    """Write the note through Ray's pyarrow file system, as every rank does.  Raises OSError."""
    filesystem.create_dir(folder, recursive=True)
    with filesystem.open_output_stream(f"{folder}/{NOTE}") as out:
        out.write(note.encode())


def read_note(checkpoint: Any) -> Note | None:
    """Return the note of a ``ray.train.Checkpoint``; ``None`` for one that holds its files itself.

    Raises Corrupt, OSError.
    """
    path = f"{checkpoint.path}/{NOTE}"
    try:
        with checkpoint.filesystem.open_input_stream(path) as stream:
            return decode_note(stream.read(_NOTES.limit), path)
    except FileNotFoundError:
        return None


# --- upload


def upload_fn(store: str, *, run: str = "", patience: float = 600.0) -> Callable[[Any, str], Any]:
    """Return a ``checkpoint_upload_fn``: each Ray worker sends its part, and Ray keeps a note.

    ``run``: the run's name in the store (default: the Ray run's).  ``patience``: how many seconds
    to wait for a file that this rank has not finished.  The function raises ckptsync's errors: the
    report fails, and with it the worker, as where Ray's own upload fails.
    """
    return partial(_upload, store, run, patience)


def _upload(store: str, run: str, patience: float, checkpoint: Any, name: str) -> Any:
    """Send this rank's part, and write its note into Ray's storage; return Ray's ``Checkpoint``.

    That is returned without a note if the directory is empty.  ``run``: the experiment's name if
    empty.  Raises as `send`, and what Ray's storage raises.
    """
    from ray import train  # noqa: PLC0415
    from ray.util import get_current_placement_group  # noqa: PLC0415

    context = train.get_context()
    storage = context.get_storage()
    # in a store a run is one directory
    run = run or context.get_experiment_name().replace("/", "-")
    group = get_current_placement_group()  # Ray makes one for each worker group
    attempt = str(group.id.hex()) if group is not None else ""
    part = RankPart(run, name, context.get_world_rank(), patience, attempt)
    with checkpoint.as_directory() as local:
        # the user may name a link to the directory
        note = send(Path(local).resolve(), store, part)
    folder = storage.build_checkpoint_path_from_name(name)
    if note is not None:
        write_note(storage.storage_filesystem, folder, note)
    return train.Checkpoint(folder, storage.storage_filesystem)


@dataclass(frozen=True, slots=True)
class RankPart:
    """One rank's part of the checkpoint ``name`` of ``run``.

    ``attempt`` is the same on all ranks, and another one each time that Ray starts the worker group
    again. A rank that is killed leaves the others' parts in the store, and the next attempt may
    write other bytes under the same name: with one save id for both, nobody could tell which part
    belongs to which.
    """

    run: str
    name: str
    rank: int
    patience: float = 600.0
    attempt: str = ""


def send(directory: Path, url: str, part: RankPart) -> Note | None:
    """Send a rank's directory to the store at ``url``; return its note, None if it has no file.

    Waits while this rank still writes, for ``part.patience``.  Logs what was not sent.

    The store sees each rank as a node: each has a directory of its own, and where two ranks have
    different bytes under one name both are stored.  All parts have one save id, so they belong
    together.  Raises ConfigError for a name or URL that cannot be used, and if the same name was
    reported before with other files; Incomplete, StoreError.
    """
    run = checked_run(part.run)
    is_taken = part.name in (checkpoint_dirs.FINAL, *checkpoint_dirs.NESTED) or is_ours(part.name)
    if is_taken or not _NAME.fullmatch(part.name):
        hint = "give checkpoint_dir_name= a name of letters, digits, '.', '_' and '-'"
        raise ConfigError(f"{part.name!r}: not a valid checkpoint name", hint=hint)
    access, location = _read_access(), located(url)
    if isinstance(location, Path) and not Path(url.removeprefix("file://")).is_absolute():
        hint = "give the store's full path"
        raise ConfigError(
            f"{url}: a relative path, and Ray's workers have directories of their own", hint=hint
        )
    listing = _list_part(directory)
    if not (listing.files or listing.partial):
        return None
    report = (url, run, part.name, str(part.rank), part.attempt)
    if _reported.get(report, _fingerprint(listing)) != _fingerprint(listing):
        # Ray reports the same again after some storage errors; other files would make one save of
        # two
        hint = (
            "give checkpoint_dir_name= another one for each report, as Ray demands: with the step"
            " in it"
        )
        raise ConfigError(f"{part.name!r}: reported before, with other files", hint=hint)
    store = create_store(url, _options(access, location), access.limits)
    family = checkpoint_dirs.family_of(part.name)
    offer = Offer(
        run,
        directory,
        (checkpoint_dirs.CheckpointDir(part.name, family, directory),),
        save=save_id(f"{run}\0{part.attempt}", part.name, 0),
    )
    progress = _push(offer, store, part, access.limits.threads)
    _reported[report] = _fingerprint(walk(directory))
    for file in listing.partial:
        _log.warning(
            "ckptsync: %s: %s is not uploaded: its name is that of an unfinished file",
            directory,
            file.path,
        )
    for note in progress.notes:
        if not note.startswith(ASSUMED):  # a report says that the checkpoint is finished
            _log.warning("ckptsync: %s: %s", directory, note)
    where = location.url if isinstance(location, Remote) else str(location)
    return Note(where, run, part.name, progress.location or part.name)


def _list_part(directory: Path) -> Listing:
    """Return a rank's files.

    Raises Incomplete if the directory is gone, ConfigError if it holds nothing but links.
    """
    if not directory.is_dir():
        hint = (
            "with checkpoint_upload_mode=ASYNC, keep the directory until it is uploaded:"
            " delete_local_checkpoint_after_upload=True lets Ray delete it afterwards"
        )
        raise Incomplete(f"{directory}: deleted before it was uploaded", hint=hint)
    listing = walk(directory)
    if listing.others and not listing.files:
        raise ConfigError(
            f"{directory}: contains only links, such as {listing.others[0]}, and ckptsync does"
            " not follow links"
        )
    return listing


def _fingerprint(listing: Listing) -> int:
    """Return a hash of the names, sizes and times of files, for this process only."""
    return hash(tuple((f.path, f.size, f.mtime) for f in listing.files))


def _push(offer: Offer, store: Store, part: RankPart, threads: int) -> UploadProgress:
    """Upload a part and return what was sent; try again while this rank still writes.

    Raises the Incomplete of the last upload after ``part.patience`` seconds.  Raises other errors
    at once, and Incomplete for a directory that is gone.
    """
    node = checked_node(f"{node_id()[:80]}.rank-{part.rank}")
    until = time.monotonic() + part.patience
    while True:
        _list_part(offer.root)
        try:
            return push(offer, store, node, threads=threads)[0]
        except Incomplete:
            if time.monotonic() >= until:
                raise
        time.sleep(_RETRY)


# --- verification


def validate(checkpoint: Any, level: str | Mapping[str, str] | None = "") -> dict[str, Any]:
    """Verify a reported checkpoint and return metrics.

    A report is written to a store that has the files; if it refuses, that is logged.  Metrics:
    ``ckptsync_verdict`` (ok, incomplete, damaged), ``ckptsync_level`` that was reached,
    ``ckptsync_read`` (bytes) and ``ckptsync_findings`` (at most ten).  ``level`` is stat, digest,
    parse or load (`ckptsync help verify`); default: digest in a store, parse where Ray's
    storage holds the files.  ``task_config``'s ``fn_kwargs`` can set it, or, up to Ray 2.53,
    ``validate_config={"level": …}`` of the report.  Damage is no exception: it is logged and in the
    metrics. Raises ConfigError for another level, and what a verification raises.
    """
    if not isinstance(level, str):
        level = (level or {}).get("level", "")
    note = read_note(checkpoint)
    try:
        verify_level = checked_level(level or ("digest" if note is not None else "parse"))
    except ValueError as e:
        raise ConfigError(f"level: {e}") from e
    options = VerifyOptions(verify_level, time.time())
    if note is None:
        with checkpoint.as_directory() as local:
            results = verify(resolve_target(local, _read_access()), options)
            return summarize_reports(checkpoint.path, [result.report for result in results])
    target, reports = InStore(_open_store(note, _read_access()), note.run, note.location), []
    for result in verify(target, options):
        reports.append(result.report)
        if result.news:
            try:
                write_report(target.store, result.news)
            except StoreError as e:  # a training's key may only upload; metrics hold the findings
                _log.warning("ckptsync: the report is not written to the store: %s", e)
    return summarize_reports(note.url, reports)


def summarize_reports(name: str, reports: list[Report]) -> dict[str, Any]:
    """Return verdict and level of the worst report, all bytes read, and ten damages at most.

    Logs these damages.  Raises ValueError without reports.
    """
    worst = max(reports, key=lambda r: _SEVERITY[r.verdict])
    damage = [
        f"{f.kind}: {f.name}: {f.detail}" for r in reports for f in r.findings if f.kind in DAMAGE
    ]
    for text in damage[:10]:
        _log.error("ckptsync: %s: %s", name, text)
    return {
        "ckptsync_verdict": worst.verdict,
        "ckptsync_level": worst.level,
        "ckptsync_read": sum(r.read for r in reports),
        "ckptsync_findings": damage[:10],
    }


# --- download


@contextlib.contextmanager
def as_directory(checkpoint: Any) -> Iterator[str]:
    """Yield a directory with all ranks' parts, as Ray's ``Checkpoint.as_directory`` does.

    What is in a store is downloaded and checked.  The ranks of a node share one directory: the
    first downloads it while the others wait, the last removes it after its block.  Raises
    Incomplete if a file cannot be had, Corrupt, ConfigError, StoreError and OSError.
    """
    note = read_note(checkpoint)
    if note is None:
        with checkpoint.as_directory() as local:
            yield local
        return
    home = _user_directory() / digest(note.encode())[:16]
    with _locked(home.parent):
        if not (home / _WHOLE).exists():
            _download_anew(home, note)
        used = _open_directory(home)
        fcntl.flock(used, fcntl.LOCK_SH)  # until this rank needs it no more
    try:
        yield str(home / note.checkpoint)
    finally:
        with _locked(home.parent):
            os.close(used)
            _remove_unused(home)


def _user_directory() -> Path:
    """Return the directory of this user's ranks on this node, made if it is missing.

    Its content will be unpickled: raises ConfigError if it is another user's, or open to others.
    """
    path = Path(tempfile.gettempdir(), f"ckptsync-ray-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise ConfigError(
            f"{path}: another user can write to it",
            hint="set TMPDIR to a directory of your own on this node",
        )
    return path


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of all this user's ranks on this node within the block; wait for it first."""
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _download_anew(home: Path, note: Note) -> None:
    """Remove unused downloads, then download a checkpoint into ``home``; remove it on errors."""
    for leftover in home.parent.iterdir():  # by ranks that were killed
        if leftover.name != _LOCK:
            _remove_unused(leftover)
    home.mkdir(mode=0o700)
    try:
        download(note, home)
        (home / _WHOLE).touch()
    except BaseException:
        shutil.rmtree(home, ignore_errors=True)
        raise


def _remove_unused(home: Path) -> None:
    """Remove a download unless another rank uses it; never waits, and ignores errors."""
    with contextlib.suppress(OSError):  # gone, or no directory
        used = _open_directory(home)
        try:
            fcntl.flock(used, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(home, ignore_errors=True)
        except BlockingIOError:
            pass  # another rank uses it, and will remove it
        finally:
            os.close(used)


def _open_directory(path: Path) -> int:
    """Return the descriptor of a directory, never through a link."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def download(note: Note, home: Path) -> Path:
    """Download all parts into a directory below ``home``, and return it.

    Each file is checked against its digest.  Raises Incomplete if one cannot be had; ConfigError or
    StoreError for the store; else as `_plan`.
    """
    access = _read_access()
    store = _open_store(note, access)
    plan = _plan(store, note)
    done = Download(home, plan).run(store, threads=access.limits.threads)
    missing = [*plan.missing, *(f"{path}: {error}" for path, error in sorted(done.failed.items()))]
    if missing:
        raise Incomplete(
            f"{note.url}: not all of its files could be downloaded: {'; '.join(missing[:3])}",
            hint="`ckptsync verify` says what is damaged",
        )
    return done.directory


def _plan(store: Store, note: Note) -> PullPlan:
    """Return the plan of a download of this very location: a newer save was not reported.

    Raises Incomplete without a valid manifest, Corrupt for files of several saves, and the error of
    records that cannot be read.
    """
    catalogue = read_location(store, note.run, note.location)
    for fault in catalogue.faults:
        if hidden_by([fault]):
            raise fault.error
    checkpoint = catalogue.of(note.run, note.location)
    if checkpoint is None:
        hint = "retention may have deleted it: `ckptsync ls` shows what the store holds"
        raise Incomplete(f"{note.url}: no valid manifest of it in the store", hint=hint)
    if checkpoint.status == "CONFLICT":
        raise Corrupt(
            f"{note.url}: its files are not provably of one save:"
            f" {'; '.join(checkpoint.evidence[:1])}"
        )
    return plan_checkpoint(checkpoint)


def _open_store(note: Note, access: Access) -> Store:
    """Open the store that a note names.  Raises ConfigError, StoreError."""
    return open_store(note.store, _options(access, located(note.store)), access.limits)


def _options(access: Access, location: Path | Remote) -> Mapping[str, object]:
    """Return the options of the store at a location."""
    return access.options_of(location) if isinstance(location, Remote) else {}


def _read_access() -> Access:
    """Return how stores are reached, by this process's environment.  Raises ConfigError."""
    options, config = from_environment()
    return Access(options, loading.limits_of(config))
