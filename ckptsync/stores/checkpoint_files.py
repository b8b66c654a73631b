"""The files of a checkpoint as `ckptsync.tensors.Files`: in a directory, in a store, or in both."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ckptsync import safe_open
from ckptsync.digest import digest
from ckptsync.errors import ConfigError, Corrupt, Incomplete, NotFound, StoreError
from ckptsync.plain_json import parse
from ckptsync.quantities import clean
from ckptsync.safe_names import RECORDS, STORE_FILE
from ckptsync.safe_open import Odd, OpenFiles
from ckptsync.stores.contract import Rooted, Store, has_root, read_all, too_short
from ckptsync.tensors import Files
from ckptsync.walk import SPOOL

MERGING = ".ckptsync-merge.json"  # stands where a merge into a store has not ended
MERGING_LIMIT = 32 << 20  # bytes of it
# safetensors', torch's; ours and other programs'
_UNFINISHED = re.compile(r"\.tmp.{6}|\.metadata\.tmp|.*\.part", re.DOTALL)
_ODD: Mapping[Odd, str] = {
    "link": "links are not followed",
    "special file": "pipes, sockets and devices are no files",
    "name": "no checkpoint has such names (control characters, or not UTF-8)",
}


def is_no_content(part: str) -> bool:
    """Return whether a file or directory with this last name is no part of a checkpoint.

    These are unfinished files, and ckptsync's own.
    """
    return part in (SPOOL, RECORDS, MERGING) or _UNFINISHED.fullmatch(part) is not None


class FileTree:
    """All files of one place as they were when it was looked at.

    ``root`` is the place as messages name it.

    Raises ConfigError where links alone are there, Incomplete where a merge has not ended,
    StoreError.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self._odd: dict[Odd, list[str]] = {}
        self._seen: Mapping[str, tuple[int, float, int]] = self._list_files()
        self._sizes = {name: size for name, (size, _, _) in self._seen.items()}
        if not self._seen and "link" in self._odd:
            hint = "links may lead anywhere: give a copy with the files themselves"
            how = "`cp -rL`; of a Hugging Face repository: `hf download … --local-dir DIR`"
            raise ConfigError(
                f"{root}: has only links, which ckptsync does not follow", hint=f"{hint} ({how})"
            )
        if self.holds(MERGING):
            try:
                record = parse(self._merging(), MERGING)
            except (NotFound, OSError, Corrupt):
                # it went away meanwhile, or is no record: what is here says for itself what it is
                return
            if isinstance(record, dict) and not record.get("ended"):
                hint = "run the same merge again: it continues"
                raise Incomplete(f"{root}: contains an unfinished merge", hint=hint)

    def sizes(self) -> Mapping[str, int]:
        """Return each file's size, as it was when the place was looked at."""
        return self._sizes

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill ``out`` from byte ``start``; raise StoreError if the disk or the store refuses."""
        raise NotImplementedError

    def written(self) -> Mapping[str, float]:
        """Return when each file was last written to by who made it, in seconds.

        Empty where no such times are known: object stores tell when a copy was made, and in a store
        of ours times are those of the upload.
        """
        raise NotImplementedError

    def changed(self) -> tuple[str, ...]:
        """Return the names of files that were replaced, written to or deleted since.

        Whoever has read from a place that a trainer may write to asks this before believing it.
        """
        raise NotImplementedError

    def holds(self, name: str) -> bool:
        """Return whether a file or directory has this name.

        That includes what is no content of a checkpoint (`is_no_content`).
        """
        raise NotImplementedError

    def state(self) -> str:
        """Return a digest of the names, sizes and times of the files."""
        return digest(
            "\n".join(sorted(repr((name, *seen)) for name, seen in self._seen.items())).encode()
        )

    def ignored_entries(self) -> tuple[str, ...]:
        """Return what is there and is none of the files, a line for each kind."""
        lines = []
        for odd, names in sorted(self._odd.items()):
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            lines.append(f"{clean(min(names))}{more}: ignored: {_ODD[odd]}")
        return tuple(lines)

    def _list_files(self) -> Mapping[str, tuple[int, float, int]]:
        """Return each file's size, time and inode, and note with `_pass_over` what is no file."""
        raise NotImplementedError

    def _merging(self) -> bytes:
        """Return the record of a merge that stands here."""
        raise NotImplementedError

    def _pass_over(self, name: str, odd: Odd) -> None:
        if not any(map(is_no_content, name.split("/"))):
            self._odd.setdefault(odd, []).append(name)


class DirectoryFiles(FileTree):
    """The regular files below a directory. Links are not followed, and not there."""

    def __init__(self, root: str) -> None:
        self._files = OpenFiles()
        super().__init__(str(Path(root).absolute()))

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        if name not in self._sizes:
            raise Incomplete(f"{name}: not in {self.root}")
        try:
            file = self._files.get(name)
            if file is None:
                file = self._files.put(name, safe_open.open_file(*self.place(name)))
            count = file.read_at(start, out)
        except OSError as e:
            if safe_open.is_absence(e):
                raise Incomplete(f"{name}: no longer in {self.root}") from e
            raise _refused(f"{self.root}/{name}", e) from e
        if count < out.nbytes:
            raise too_short(name, start + count, start, out.nbytes)

    def written(self) -> Mapping[str, float]:
        if any((place / STORE_FILE).is_file() for place in Path(self.root).parents):
            return {}
        return {name: mtime / 1e9 for name, (_, mtime, _) in self._seen.items()}

    def changed(self) -> tuple[str, ...]:
        return tuple(name for name, seen in self._seen.items() if seen != self._now(name))

    def holds(self, name: str) -> bool:
        return os.path.lexists(f"{self.root}/{name}")

    def _list_files(self) -> Mapping[str, tuple[int, float, int]]:
        try:
            files = list(safe_open.files_below(self.root, "", is_no_content, self._pass_over))
        except OSError as e:
            if not safe_open.is_absence(e):
                raise _refused(str(Path(self.root, str(e.filename or ""))), e) from e
            fault = "not a directory" if os.path.lexists(self.root) else "no such directory"
            hint = "check the path"
            if Path(self.root).is_file():
                hint = (
                    "name the directory that the file lies in; --source says which of several is"
                    " meant"
                )
            raise ConfigError(
                f"{self.root}: {fault}, a checkpoint's directory expected", hint=hint
            ) from e
        return {name: _stamp(stat) for name, stat in files}

    def _now(self, name: str) -> tuple[int, float, int] | None:
        try:
            return _stamp(safe_open.stat_file(*self.place(name)))
        except OSError as e:
            if safe_open.is_absence(e):
                return None
            raise _refused(f"{self.root}/{name}", e) from e

    def _merging(self) -> bytes:
        with os.fdopen(safe_open.open_file(self.root, MERGING), "rb") as file:
            return file.read(MERGING_LIMIT)

    def place(self, name: str) -> tuple[str, str]:
        """Return the directory that a file is opened below, and its name there."""
        return self.root, name


class SnapshotFiles(DirectoryFiles):
    """The files of a snapshot in Hugging Face's cache, which are links to its blobs.

    ``repository`` is the snapshot's ``models--…``, ``depth`` how far above ``root`` it is.  A link
    is followed to a regular file directly in ``blobs`` there, and to nothing else; where it leads
    is read once.
    """

    def __init__(self, root: str, repository: str, depth: int) -> None:
        self._repository, self._depth = repository, depth
        self._blobs: dict[str, str] = {}
        super().__init__(root)

    def _list_files(self) -> Mapping[str, tuple[int, float, int]]:
        seen = dict(super()._list_files())
        for name in self._odd.pop("link", ()):
            try:
                blob = self._blob(name)
                stamp = _stamp(safe_open.stat_file(self._repository, blob)) if blob else None
            except OSError as e:
                if not safe_open.is_absence(e):
                    raise _refused(f"{self.root}/{name}", e) from e
                stamp = None
            if stamp is None:
                self._pass_over(name, "link")
            else:
                seen[name], self._blobs[name] = stamp, blob
        return dict(sorted(seen.items()))

    def place(self, name: str) -> tuple[str, str]:
        """See `DirectoryFiles`."""
        blob = self._blobs.get(name)
        return (self._repository, blob) if blob else super().place(name)

    def _blob(self, name: str) -> str:
        """Return where a link leads, as ``blobs/…``; empty if elsewhere.  Raises OSError."""
        with safe_open.parent_of(self.root, name) as (at, last):
            target = os.readlink(last, dir_fd=at)
        up = "../" * (self._depth + name.count("/"))
        blob = target.removeprefix(up)
        is_blob = target.startswith(up) and re.fullmatch(r"blobs/[^/]+", blob) is not None
        return blob if is_blob and safe_open.is_plain_path(blob) else ""


def directory_files(root: str) -> DirectoryFiles:
    """Return the files below a directory that the operator named.

    Raises as `FileTree` does.
    """
    real = Path(os.path.realpath(root))
    for above in real.parents[1:]:
        inside = real.relative_to(above).parts
        if above.name.startswith("models--") and inside[0] == "snapshots":
            return SnapshotFiles(root, str(above), len(inside))
    return DirectoryFiles(root)


def _stamp(stat: os.stat_result) -> tuple[int, float, int]:
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def _refused(path: str, e: OSError) -> StoreError:
    hint = "run ckptsync as the user who trains" if isinstance(e, PermissionError) else ""
    return StoreError(f"{path}: {(e.strerror or str(e)).lower()}", hint=hint)


class ListedFiles(FileTree):
    """All files that a store lists; ``root`` is the store's URL.

    ``is_dated``: the store keeps the times that files had where they were written; else nothing is
    concluded from them. Raises ConfigError if there is nothing, too.
    """

    def __init__(self, store: Store, *, is_dated: bool = False) -> None:
        self._store, self._is_dated = store, is_dated
        self._all: frozenset[str] = frozenset()
        super().__init__(store.url)

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        if name not in self._sizes:
            raise Incomplete(f"{name}: not in {self.root}")
        try:
            self._store.read_into(name, start, out)
        except NotFound as e:
            raise Incomplete(f"{name}: no longer in {self.root}") from e

    def written(self) -> Mapping[str, float]:
        return {name: mtime for name, (_, mtime, _) in self._seen.items()} if self._is_dated else {}

    def changed(self) -> tuple[str, ...]:
        now = {entry.name: (entry.size, entry.mtime, 0) for entry in self._store.names("")}
        return tuple(name for name, seen in self._seen.items() if now.get(name) != seen)

    def holds(self, name: str) -> bool:
        return name in self._all

    def _list_files(self) -> Mapping[str, tuple[int, float, int]]:
        store = self._store
        if not has_root(store):
            raise ConfigError(
                f"{self.root}: no such directory, a checkpoint's directory expected",
                hint="check the path",
            )
        entries = list(
            store.names_reporting(self._pass_over) if isinstance(store, Rooted) else store.names("")
        )
        if not entries and "link" not in self._odd:
            raise ConfigError(
                f"{self.root}: nothing found, a checkpoint's directory expected",
                hint="check the URL",
            )
        self._all = frozenset(entry.name for entry in entries)
        content = (entry for entry in entries if not any(map(is_no_content, entry.name.split("/"))))
        return {entry.name: (entry.size, entry.mtime, 0) for entry in content}

    def _merging(self) -> bytes:
        return read_all(self._store, MERGING, MERGING_LIMIT)


class Overlay:
    """The union of several trees; where a name is in several, the first tree has it."""

    def __init__(self, trees: Sequence[Files]) -> None:
        self._owners: dict[str, tuple[Files, ...]] = {}
        for tree in trees:
            for name in tree.sizes():
                self._owners[name] = (*self._owners.get(name, ()), tree)
        self._sizes = {
            name: owners[0].sizes()[name] for name, owners in sorted(self._owners.items())
        }

    def sizes(self) -> Mapping[str, int]:
        return self._sizes

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        if name not in self._owners:
            raise Incomplete(f"{name}: not found in any of the given directories or URLs")
        self._owners[name][0].read_into(name, start, out)

    def duplicates(self, name: str) -> tuple[Files, ...]:
        """Return the trees that have ``name``, in the order given.

        Callers can compare the bytes of the trees.
        """
        return self._owners.get(name, ())

    def conflicts(self) -> tuple[str, ...]:
        """Return the names whose sizes differ between trees, sorted.

        Trees with such names cannot be one save of one checkpoint.
        """
        return tuple(
            name
            for name, owners in sorted(self._owners.items())
            if len({o.sizes()[name] for o in owners}) > 1
        )


class StoreFiles:
    """Files of a store under a checkpoint's own names: ``{path: (name in the store, size)}``."""

    def __init__(self, store: Store, where: Mapping[str, tuple[str, int]]) -> None:
        self._store, self._where = store, dict(where)
        self._sizes = {path: size for path, (_, size) in sorted(self._where.items())}

    def sizes(self) -> Mapping[str, int]:
        return self._sizes

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        if name not in self._where:
            raise Incomplete(f"{name}: not named by any manifest")
        try:
            self._store.read_into(self._where[name][0], start, out)
        except NotFound as e:
            raise Incomplete(f"{name}: not in the store as {self._where[name][0]}") from e


class TopFiles:
    """The files directly in a directory of this machine, with their sizes at construction.

    Raises ConfigError.

    ``follows_links``: of a directory that the operator named, since a Hugging Face snapshot is made
    of links; never of one that was found.
    """

    def __init__(self, root: str, *, follows_links: bool) -> None:
        try:
            with os.scandir(root) as entries:
                files = [entry for entry in entries if entry.is_file(follow_symlinks=follows_links)]
        except OSError as e:
            hint = "a directory with config.json and tokenizer files is expected"
            raise ConfigError(f"{root}: {(e.strerror or str(e)).lower()}", hint=hint) from e
        self._paths = {
            file.name: os.path.realpath(file.path) if follows_links else file.path for file in files
        }
        self.root = root
        self.stamps = {name: _stamp(os.lstat(path)) for name, path in sorted(self._paths.items())}
        self._sizes = {name: size for name, (size, _, _) in self.stamps.items()}

    def sizes(self) -> Mapping[str, int]:
        return self._sizes

    def changed(self) -> tuple[str, ...]:
        """Return the names of files that were replaced, written to or deleted since."""
        return tuple(name for name, stamp in self.stamps.items() if stamp != self._now(name))

    def _now(self, name: str) -> tuple[int, float, int] | None:
        try:
            return _stamp(os.lstat(self._paths[name]))
        except FileNotFoundError:
            return None

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        if name not in self._paths:
            raise Incomplete(f"{name}: not found")
        fd = os.open(self._paths[name], os.O_RDONLY | os.O_NOFOLLOW)
        try:
            if safe_open.read_at(fd, start, out) < out.nbytes:
                raise Corrupt(f"{self._paths[name]}: became shorter while it was read")
        finally:
            os.close(fd)
