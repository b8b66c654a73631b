"""One node: its configuration, its store and its output directories, as the service would find them."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ckptsync.config.reach import options_for
from ckptsync.config.runs import output_directories
from ckptsync.config.values import Config
from ckptsync.doctor import mounting, output_dirs, permissions, probe
from ckptsync.doctor.asking import Asked, is_directory, words
from ckptsync.doctor.findings import SETUP, STORAGE, Finding
from ckptsync.errors import CkptsyncError, ConfigError, Corrupt, StoreError
from ckptsync.parsing import parse
from ckptsync.records.names import clock_name
from ckptsync.spool import folders
from ckptsync.stores.contract import Store
from ckptsync.stores.limits import Limits
from ckptsync.stores.mounts import mount_of
from ckptsync.stores.opening import NoParent, bare, create_store, has_root
from ckptsync.stores.urls import Remote, located
from ckptsync.walk import OURS
from ckptsync.watch import is_blind
from ckptsync.worker.clock import DAY, measure
from ckptsync.worker.node import umask

_LONGEST = 64 * 1024  # bytes of the name of a store
_NOTHING = "no checkpoint is uploaded"
_PATIENCE = 2.0  # seconds
_STALL = 10.0  # seconds without a byte: nobody who asks what is wrong waits as long as an upload does
_EVER = 40 * 365 * DAY  # a node may come up in the year of its firmware; a store that is farther off tells no time


@dataclass(frozen=True, slots=True)
class Place:
    """A store as it is configured; ``deletes``: whether this machine's roles let go of what is there."""

    url: str
    options: Mapping[str, object]
    limits: Limits
    deletes: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """``store``: where it can be used; ``clock``: this node's, beside it, in seconds, ``None`` where that cannot be told."""

    findings: tuple[Finding, ...]
    store: Store | None = None
    clock: float | None = None


def refusal(e: CkptsyncError, kind: str, node: str, subject: str, why: str) -> Finding:
    """An error as a failure that was found."""
    code = STORAGE if isinstance(e, StoreError) else SETUP
    what = str(e).removeprefix(f"{subject}: ")
    return Finding("fail", kind, (node,), subject, what, why, e.hint or "read what it says", code)


def runs(config: Config, node: str) -> Iterator[Finding]:
    """What a worker's configuration names that it could not serve."""
    if "worker" not in config.roles:
        return
    found = output_directories(config.worker.runs, config.store.url)
    for problem in (*found.problems, *(found.unsafe if os.geteuid() else ())):  # root is told so of each directory
        yield Finding(
            "fail", "run-left-out", (node,), "worker.runs", problem, "its checkpoints stay where they are", "change worker.runs"
        )
    for run in config.worker.runs:
        above = _above(Path(run.path))
        if not is_directory(above):
            what = f"{above} is not there, or not to be reached by this user"
            hint = "is the file system mounted, and the path right?"
            yield Finding("warn", "output-absent", (node,), run.path, what, _NOTHING, hint, STORAGE)


def _above(path: Path) -> Path:
    """Where the first thing would appear that a training makes: what stands before a wildcard, or the parent."""
    fixed = mounting.fixed(path)
    return path.parent if fixed == path else fixed


def store(place: Place, node: str, outputs: Iterable[Path], *, creates: bool = False) -> Answer:
    """Whether it can be used, right by right.  ``creates``: a store that is not there yet is made, as the first worker would."""
    try:
        if creates:
            begin(place, outputs)
        found = there(place)
        if found is None:
            return Answer(tuple(_absent(place.url, node, outputs)))
        refused = _refused(found, place, node)
        here = tuple(_here(place.url, node, outputs))
        return Answer((*refused, *here)) if refused else Answer(here, found, _clock(found, node))
    except NoParent as e:
        return Answer((refusal(e, "store-absent", node, shown(place.url), _NOTHING),))
    except CkptsyncError as e:
        return Answer((refusal(e, "store-unreachable", node, shown(place.url), _NOTHING),))


def _refused(found: Store, place: Place, node: str) -> tuple[Finding, ...]:
    """What the store does not allow; of another user's directory as that user, where root asks.  Raises CkptsyncError."""
    where = located(place.url)
    if isinstance(where, Remote):
        return tuple(permissions.refused(found, node, deletes=place.deletes))

    def tried() -> Iterator[Finding]:
        try:
            refused = tuple(permissions.refused(found, node, deletes=place.deletes))
        except CkptsyncError as e:
            refused = (refusal(e, "store-unreachable", node, shown(place.url), _NOTHING),)
        yield from refused or _closed(where, place.url, node)

    try:
        return tuple(output_dirs.as_user(where.stat().st_uid, tried))
    except OSError as e:
        raise StoreError(f"{where}: {words(e)}", hint="ask as the user whose directory it is") from e


def _clock(found: Store, node: str) -> float:
    """As `clock`, by the user whose directory the store is, where root asks."""
    where = located(found.url)
    if isinstance(where, Remote):
        return clock(found, node)
    try:
        return float(probe.as_user(where.stat().st_uid, lambda: clock(found, node)))
    except OSError as e:
        raise StoreError(f"{where}: {words(e)}", hint="ask as the user whose directory it is") from e


def _closed(where: Path, url: str, node: str) -> Iterator[Finding]:
    """Of a directory: whether that of a run can be made in it, beside our own, which somebody else may have made."""
    try:
        fd = os.open(where, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            name = f".ckptsync-doctor-{secrets.token_hex(8)}"
            os.mkdir(name, 0o700, dir_fd=fd)
            os.rmdir(name, dir_fd=fd)
        finally:
            os.close(fd)
    except OSError as e:
        what = f"{where}: no directory of a run can be made there: {words(e)}"
        hint = "let this user, or a group that it is in, write there"
        yield Finding("fail", "store-create", (node,), url, what, permissions.WHY["create"], hint, STORAGE)


def shown(url: str) -> str:
    """A store's URL as it may be told; of one that is refused, as for a password in it, no more than its scheme."""
    try:
        located(url)
    except ConfigError:
        return f"{url.partition('://')[0]}://…" if "://" in url else url
    return url


def clock(store: Store, node: str) -> float:
    """How far a node's is ahead of the store's, in seconds.  Raises StoreError."""
    name = f"{node}~doctor"  # not the worker's own, which it may be using now
    try:
        return measure(store, name, _EVER) / 1e9
    finally:
        with contextlib.suppress(StoreError):  # a worker may not be allowed to delete: then it stays, and is written over
            store.delete(clock_name(name))


def begin(place: Place, outputs: Iterable[Path]) -> None:
    """Make a store that is not there yet, as the first worker would; one that was there before is waited for.  Raises CkptsyncError."""
    where = located(place.url)
    if there(place) is None and not _served(where, outputs):
        written(place.url, lambda: create_store(place.url, _options(place), _hasty(place)))


def written(url: str, work: Callable[[], object]) -> None:
    """Do what writes to a store: in another user's directory as that user, where root asks.  Raises CkptsyncError."""
    where = located(url)
    if isinstance(where, Remote):
        work()
        return

    def tried() -> list[str]:
        try:
            work()
        except CkptsyncError as e:
            return [str(e), e.hint or "", "setup" if isinstance(e, ConfigError) else ""]
        return []

    try:
        refused = probe.as_user(next(path for path in (where, *where.parents) if path.is_dir()).stat().st_uid, tried)
    except OSError as e:
        raise StoreError(f"{where}: {words(e)}", hint="ask as the user whose directory it is") from e
    if refused:
        why, hint, is_setup = refused
        raise (ConfigError if is_setup else StoreError)(why, hint=hint)


def _hasty(place: Place) -> Limits:
    """What fails is tried again for a moment only: S3 tells its region, and its time, by a refusal."""
    return replace(place.limits, patience=_PATIENCE, stall=min(place.limits.stall, _STALL))


def _options(place: Place) -> Mapping[str, object]:
    return options_for(place.url, place.options) if isinstance(located(place.url), Remote) else {}


def _served(where: Path | Remote, outputs: Iterable[Path]) -> list[Path]:
    """Output directories whose worker has served that very store."""
    return [path for path in outputs if _remembered(path) == (where.url if isinstance(where, Remote) else str(where))]


def _remembered(output_dir: Path) -> str:
    """The store that its worker served last; empty where nobody knows."""

    def told() -> str:
        return (folders.read(output_dir / OURS / "store", _LONGEST) or b"").decode("utf-8", "replace").strip()

    with contextlib.suppress(OSError):
        return str(probe.as_user(output_dir.stat().st_uid, told))
    return ""


def there(place: Place) -> Store | None:
    """What is there, without asking whether it is one of ours yet; nothing is tried twice.  Raises CkptsyncError."""
    where = located(place.url)
    try:
        if isinstance(where, Path) and not where.is_dir():
            return None
    except OSError as e:
        raise StoreError(f"{where}: {words(e)}", hint="look at the directories above it") from e
    found = bare(place.url, _options(place), _hasty(place))
    return found if has_root(found) else None


def _absent(url: str, node: str, outputs: Iterable[Path]) -> Iterator[Finding]:
    where = located(url)
    served = _served(where, outputs)
    hint = "is the file system mounted, and the path right?"
    if served:
        what = f"not there, and was when {served[0]} was last served"
        yield Finding("fail", "store-absent", (node,), url, what, "the worker waits for it to come back", hint, STORAGE)
    elif isinstance(where, Remote):
        why = f"the first worker or `ckptsync push` makes it, if the directory above it is there: {where.rest.rpartition('/')[0]}"
        yield Finding("warn", "store-absent", (node,), url, "not there", why, hint, STORAGE)
    elif not is_directory(where.parent):
        why = f"no store is made without the directory above it, {where.parent}: a worker waits for that, and `ckptsync push` fails"
        yield Finding(
            "warn", "store-absent", (node,), url, "not there", why, f"{hint}  If both are: mkdir -p {where.parent}", STORAGE
        )


def _here(url: str, node: str, outputs: Iterable[Path]) -> Iterator[Finding]:
    """Of a store that is a directory: its file system, its room for the largest of the newest checkpoints here, and who else is to read it."""
    where = located(url)
    if isinstance(where, Remote):
        return
    asked = Asked(node, os.geteuid())
    yield from mounting.unmounted(where, asked)
    yield from mounting.mounted(where, asked)
    newest = [found for path in outputs if output_dirs.is_there(path) and (found := output_dirs.last_two(path)[0])]
    yield from output_dirs.check_space(where, max(newest, key=output_dirs.size, default=None), asked)
    mask = int(umask() or "0", 8)
    if where.stat().st_mode & stat.S_ISGID and mask & 0o040:
        why = "the store is a group's: the head and other users could not read what is sent"
        yield Finding("warn", "umask", (node,), url, f"umask {mask:04o}", why, "umask 0002 (UMask= of a unit)")


def outputs(paths: Iterable[Path], asked: Asked) -> Iterator[Finding]:
    """Output directories that are there, and the room for those that are not yet."""
    present = [path for path in paths if output_dirs.is_there(path)]
    for path in present:
        yield from output_dirs.check_output_dir(path, asked)
    for path in paths:
        if path not in present and (above := next((p for p in path.parents if is_directory(p)), None)):
            yield from mounting.unmounted(path, asked)
            yield from output_dirs.check_space(above, None, asked)
    yield from output_dirs.check_inotify(asked.node, [path for path in present if not is_blind(mount_of(str(path)).kind)])


def expected(model: str, training: Mapping[str, str]) -> int:
    """Bytes of a checkpoint of the whole model with its optimizer; 0 where only a part of it is trained, or nobody says."""
    is_whole = (
        training.get("finetuning_type", "full" if "model_name_or_path" not in training else "lora") == "full"
    )  # LLaMA-Factory's default is lora
    with contextlib.suppress(Corrupt, AttributeError):
        return (
            output_dirs.full_checkpoint_size(parse(_text(Path(model, "config.json")) or "{}", model)) if model and is_whole else 0
        )
    return 0


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""  # nothing is said there
