"""The files of a checkpoint as `ckptsync.model.Files`: of a local directory, of several overlaid, of a store, or at the top of a directory."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from ckptsync.digest import digest
from ckptsync.errors import ConfigError, Corrupt, Incomplete, NotFound, StoreError
from ckptsync.model import Files
from ckptsync.parsing import parse
from ckptsync.records.names import STORE_FILE
from ckptsync.stores import beneath
from ckptsync.stores.beneath import OpenFiles, Passed
from ckptsync.stores.contract import Entry, Store, read_all
from ckptsync.stores.opening import has_root
from ckptsync.units import clean

OURS = ("_ckptsync", ".ckptsync")
MERGING = ".ckptsync-merge.json"  # stands where a merge into a store has not ended
MERGING_LIMIT = 32 << 20  # bytes of it
_UNFINISHED = re.compile(r"\.tmp.{6}|\.metadata\.tmp|.*\.part", re.DOTALL)  # safetensors', torch's; ours and other programs'


def is_no_content(part: str) -> bool:
    """Whether a file or directory with this last name is no part of a checkpoint: unfinished, or ckptsync's own."""
    return part in (*OURS, MERGING) or _UNFINISHED.fullmatch(part) is not None


class Tree(Files, Protocol):
    """The files of one place as they were when it was looked at; ``root`` is the place as messages name it."""

    root: str

    def written(self) -> Mapping[str, float]:
        """When each file was last written to by who made it, in seconds.

        Empty where no such times are known: object stores tell when a copy was made, and in a store of ours times are those of arrival.
        """
        ...

    def changed(self) -> tuple[str, ...]:
        """Names of files that were replaced, written to or deleted since.

        Whoever has read from a place that a trainer may write to asks this before believing what was read.
        """
        ...

    def state(self) -> str:
        """Something else for every other state of the files: of their names, sizes and times."""
        ...

    def holds(self, name: str) -> bool:
        """Whether something has this name, be it no content of a checkpoint (`is_no_content`)."""
        ...

    def passed_over(self) -> tuple[str, ...]:
        """What is there and is none of the files, a line for each kind; as far as a listing tells of it."""
        ...


def check_ended(root: str, record: Callable[[], bytes]) -> None:
    """Raise Incomplete if the record of a merge, which stands here, does not say that it has ended."""
    try:
        told = parse(record(), MERGING)
    except (NotFound, OSError, Corrupt):
        return  # it went away meanwhile, or is no record: what is here says for itself what it is
    if isinstance(told, dict) and not told.get("ended"):
        raise Incomplete(f"{root}: a merge into it has not ended", hint="run the same merge again: it goes on where it was ended")


def state(files: Iterable[tuple[object, ...]]) -> str:
    """A digest of what is known of each."""
    return digest("\n".join(sorted(map(repr, files))).encode())


_COPY = "links may lead anywhere: give a copy with the files themselves (`cp -rL`; of a Hugging Face repository: `hf download … --local-dir DIR`)"
_ODD: Mapping[beneath.Odd, str] = {
    "link": "links are not followed",
    "special file": "pipes, sockets and devices are no files",
    "name": "no checkpoint has such names (control characters, or not UTF-8)",
}


class PassedOver:
    """What was met in a listing and is none of the files, by kind."""

    def __init__(self) -> None:
        self._names: dict[beneath.Odd, list[str]] = {}

    def add(self, name: str, odd: beneath.Odd) -> None:
        """One more; nothing of what is no content anyway."""
        if not any(map(is_no_content, name.split("/"))):
            self._names.setdefault(odd, []).append(name)

    def check_not_links(self, root: str) -> None:
        """Of a place without a file; raises ConfigError if there are links."""
        if "link" in self._names:
            raise ConfigError(f"{root}: holds links alone, which are not followed", hint=_COPY)

    def lines(self) -> tuple[str, ...]:
        """A line for each kind."""
        return tuple(_told(odd, names) for odd, names in sorted(self._names.items()))


def _told(odd: beneath.Odd, names: Sequence[str]) -> str:
    first = clean(min(names))
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{first}{more}: not looked at, since {_ODD[odd]}"


@dataclass(frozen=True, slots=True)
class _Sighting:
    size: int
    mtime_ns: int
    inode: int


class LocalFiles:
    """The regular files below a directory as they were at construction.  Links are not followed, and not there; a directory of links alone is a ConfigError."""

    def __init__(self, root: str) -> None:
        self.root = str(Path(root).absolute())
        self._odd = PassedOver()
        self._seen = {name: _sighting(found) for name, found in _walk(self.root, self._odd)}
        if not self._seen:
            self._odd.check_not_links(self.root)
        if self.holds(MERGING):
            check_ended(self.root, self._merging)
        self._sizes = {name: seen.size for name, seen in self._seen.items()}
        self._files = OpenFiles(lambda name: beneath.open_file(self.root, name))

    def sizes(self) -> Mapping[str, int]:
        """As they were at construction."""
        return self._sizes

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """As `Files` says; raises StoreError where the disk or its permissions refuse."""
        if name not in self._sizes:
            raise Incomplete(f"{name}: not in {self.root}")
        try:
            count = self._files.get(name).read_at(start, out)
        except OSError as e:
            if beneath.is_absence(e):
                raise Incomplete(f"{name}: no longer in {self.root}") from e
            raise _refused(f"{self.root}/{name}", e) from e
        if count < out.nbytes:
            raise Corrupt(f"{name}: ends at byte {start + count}, {out.nbytes} bytes from {start} wanted")

    def written(self) -> Mapping[str, float]:
        """As `Tree` says."""
        if any((place / STORE_FILE).is_file() for place in Path(self.root).parents):
            return {}
        return {name: seen.mtime_ns / 1e9 for name, seen in self._seen.items()}

    def changed(self) -> tuple[str, ...]:
        """As `Tree` says."""
        return tuple(name for name, seen in self._seen.items() if seen != self._now(name))

    def state(self) -> str:
        """As `Tree` says."""
        return state((name, seen.size, seen.mtime_ns, seen.inode) for name, seen in self._seen.items())

    def holds(self, name: str) -> bool:
        """As `Tree` says."""
        return os.path.lexists(f"{self.root}/{name}")

    def passed_over(self) -> tuple[str, ...]:
        """As `Tree` says."""
        return self._odd.lines()

    def _merging(self) -> bytes:
        with os.fdopen(beneath.open_file(self.root, MERGING), "rb") as file:
            return file.read(MERGING_LIMIT)

    def _now(self, name: str) -> _Sighting | None:
        try:
            return _sighting(beneath.stat_file(self.root, name))
        except OSError as e:
            if beneath.is_absence(e):
                return None
            raise _refused(f"{self.root}/{name}", e) from e


class Overlay:
    """The union of several trees; where a name is in several, the first tree has it."""

    def __init__(self, trees: Sequence[Files]) -> None:
        self._owners: dict[str, tuple[Files, ...]] = {}
        for tree in trees:
            for name in tree.sizes():
                self._owners[name] = (*self._owners.get(name, ()), tree)
        self._sizes = {name: owners[0].sizes()[name] for name, owners in sorted(self._owners.items())}

    def sizes(self) -> Mapping[str, int]:
        """As the first tree of each name says."""
        return self._sizes

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """As `Files` says."""
        if name not in self._owners:
            raise Incomplete(f"{name}: in none of the places given")
        self._owners[name][0].read_into(name, start, out)

    def duplicates(self, name: str) -> tuple[Files, ...]:
        """The trees that have ``name``, in the order given, so that callers can compare their bytes."""
        return self._owners.get(name, ())

    def conflicts(self) -> tuple[str, ...]:
        """Names whose sizes differ between trees, sorted: these trees cannot be one save of one checkpoint."""
        return tuple(name for name, owners in sorted(self._owners.items()) if len({o.sizes()[name] for o in owners}) > 1)


class StoreFiles:
    """Files of a store under a checkpoint's own names: ``{path: (name in the store, size)}``."""

    def __init__(self, store: Store, where: Mapping[str, tuple[str, int]]) -> None:
        self._store, self._where = store, dict(where)
        self._sizes = {path: size for path, (_, size) in sorted(self._where.items())}

    def sizes(self) -> Mapping[str, int]:
        """As given."""
        return self._sizes

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """As `Files` says; raises StoreError where the store does not answer."""
        if name not in self._where:
            raise Incomplete(f"{name}: not named by any manifest")
        try:
            self._store.read_into(self._where[name][0], start, out)
        except NotFound as e:
            raise Incomplete(f"{name}: not in the store as {self._where[name][0]}") from e


_OF_FILE = "name the directory that the file lies in; --source says which of several is meant"


def _walk(root: str, odd: PassedOver) -> list[tuple[str, os.stat_result]]:
    try:
        return list(beneath.walk(root, "", is_no_content, odd.add))
    except OSError as e:
        if beneath.is_absence(e):
            fault = "not a directory" if os.path.lexists(root) else "no such directory"
            hint = _OF_FILE if Path(root).is_file() else "is the path right?"
            raise ConfigError(f"{root}: {fault}, a checkpoint's directory wanted", hint=hint) from e
        raise _refused(str(Path(root, str(e.filename or ""))), e) from e


def _sighting(found: os.stat_result) -> _Sighting:
    return _Sighting(found.st_size, found.st_mtime_ns, found.st_ino)


def _refused(path: str, e: OSError) -> StoreError:
    hint = "ckptsync runs best as the user who trains" if isinstance(e, PermissionError) else ""
    return StoreError(f"{path}: {(e.strerror or str(e)).lower()}", hint=hint)


@runtime_checkable
class ReportsPassed(Protocol):
    """A store that meets what is no file as it lists."""

    def telling(self, passed: Passed) -> Iterator[Entry]:
        """All `names`; ``passed`` is told of what is left out."""
        ...


class ListedFiles:
    """The files of ``store`` as they were at construction, all of them; ``root`` is the store's URL.

    ``is_dated``: the store keeps the times that files had where they were written; else nothing is concluded from them.  Raises ConfigError if
    there is nothing, StoreError.
    """

    def __init__(self, store: Store, *, is_dated: bool = False) -> None:
        self._store, self._is_dated = store, is_dated
        self.root = store.url
        if not has_root(store):
            raise ConfigError(f"{self.root}: no such directory, a checkpoint's directory wanted", hint="is the path right?")
        self._odd = PassedOver()
        listed = store.telling(self._odd.add) if isinstance(store, ReportsPassed) else store.names("")
        self._all = {entry.name: entry for entry in listed}
        self._seen = {name: entry for name, entry in self._all.items() if not any(map(is_no_content, name.split("/")))}
        if MERGING in self._all:
            check_ended(self.root, lambda: read_all(store, MERGING, MERGING_LIMIT))
        if not self._seen:
            self._odd.check_not_links(self.root)
        if not self._all:
            raise ConfigError(f"{self.root}: nothing is there, a checkpoint's directory wanted", hint="is the URL right?")
        self._sizes = {name: entry.size for name, entry in self._seen.items()}

    def sizes(self) -> Mapping[str, int]:
        """As they were at construction."""
        return self._sizes

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """As `Files` says; raises StoreError where the store does not answer."""
        if name not in self._sizes:
            raise Incomplete(f"{name}: not in {self.root}")
        try:
            self._store.read_into(name, start, out)
        except NotFound as e:
            raise Incomplete(f"{name}: no longer in {self.root}") from e

    def written(self) -> Mapping[str, float]:
        """As `Tree` says."""
        return {name: entry.mtime for name, entry in self._seen.items()} if self._is_dated else {}

    def changed(self) -> tuple[str, ...]:
        """As `Tree` says: what the store lists now with another size or time, or no longer."""
        now = {entry.name: entry for entry in self._store.names("")}
        return tuple(name for name, entry in self._seen.items() if now.get(name) != entry)

    def state(self) -> str:
        """As `Tree` says."""
        return state((name, entry.size, entry.mtime) for name, entry in self._seen.items())

    def holds(self, name: str) -> bool:
        """As `Tree` says."""
        return name in self._all

    def passed_over(self) -> tuple[str, ...]:
        """As `Tree` says: an object store has files alone."""
        return self._odd.lines()


class _TopFiles:
    """Name → the path that holds it, and its size, as they were at construction."""

    def __init__(self, paths: Iterable[tuple[str, str]]) -> None:
        self._paths = dict(paths)
        self._sizes = {name: Path(path).lstat().st_size for name, path in sorted(self._paths.items())}

    def sizes(self) -> Mapping[str, int]:
        return self._sizes

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        if name not in self._paths:
            raise Incomplete(f"{name}: not there")
        fd = os.open(self._paths[name], os.O_RDONLY | os.O_NOFOLLOW)
        try:
            if os.preadv(fd, [out], start) < out.nbytes:
                raise Corrupt(f"{self._paths[name]}: became shorter while it was read")
        finally:
            os.close(fd)


def top_files_without_links(root: str) -> Files:
    """The regular files of a directory that was found, not named: links in it are not followed.  Raises ConfigError."""
    return _top(root, lambda entry: entry.path if entry.is_file(follow_symlinks=False) else "")


def top_files(root: str) -> Files:
    """The files of a directory that the operator named: links in it are followed, since a Hugging Face snapshot is made of them.

    Raises ConfigError.
    """
    return _top(root, lambda entry: os.path.realpath(entry.path) if entry.is_file() else "")


def _top(root: str, path_of: Callable[[os.DirEntry[str]], str]) -> Files:
    try:
        with os.scandir(root) as entries:
            return _TopFiles((entry.name, path) for entry in entries if (path := path_of(entry)))
    except OSError as e:
        hint = "a directory with config.json and tokenizer files is wanted"
        raise ConfigError(f"{root}: {(e.strerror or str(e)).lower()}", hint=hint) from e
