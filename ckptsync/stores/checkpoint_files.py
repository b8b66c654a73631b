"""The files of a checkpoint as `ckptsync.tensors.Files`: in a directory, in a store, or in both.

A merge, a verification and a report read names, sizes and ranges, wherever the files are. Each
class here takes a listing of one place, once, and reads ranges of what it listed. So the rules of
what belongs to a checkpoint (no links, nothing unfinished, nothing of ckptsync's own) stand in one
module.
"""

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

MERGING = ".ckptsync-merge.json"  # lies in the destination until a merge into a store has ended
MERGING_LIMIT = 32 << 20  # bytes of that file
# safetensors', torch's; ours and other programs'
_UNFINISHED = re.compile(r"\.tmp.{6}|\.metadata\.tmp|.*\.part", re.DOTALL)
_ODD: Mapping[Odd, str] = {
    "link": "links are not followed",
    "special file": "pipes, sockets and devices are no files",
    "name": "no checkpoint has such names (control characters, or not UTF-8)",
}


Stamp = tuple[int, float, int]
"""Size, mtime in ns and inode of a file: they differ if it was changed.

Of a stored file: size, mtime in seconds, and 0.
"""


def is_no_content(part: str) -> bool:
    """Return whether a file or directory with this last name is no part of a checkpoint.

    These are unfinished files (of any program: ``*.part``, …), and ckptsync's own.
    """
    return part in (SPOOL, RECORDS, MERGING) or _UNFINISHED.fullmatch(part) is not None


class FileTree:
    """All files of one place as they were when it was listed.

    ``root`` is the place as messages name it. The constructor lists the place.

    Raises:
        ConfigError: the place is missing, or has links and nothing else.
        Incomplete: a merge into this place has not ended.
        StoreError: the disk or the store refuses.

    """

    def __init__(self, root: str) -> None:
        """List the place; raise as the class says."""
        self.root = root
        self._ignored: dict[Odd, list[str]] = {}
        self._stamps: Mapping[str, Stamp] = self._list_files()
        self._sizes = {name: size for name, (size, _, _) in self._stamps.items()}
        if not self._stamps and "link" in self._ignored:
            hint = "links may lead anywhere: give a copy with the files themselves"
            how = "`cp -rL`; of a Hugging Face repository: `hf download … --local-dir DIR`"
            raise ConfigError(
                f"{root}: has only links, which ckptsync does not follow", hint=f"{hint} ({how})"
            )
        if self.holds(MERGING):
            try:
                record = parse(self._read_merge_record(), MERGING)
            except (NotFound, OSError, Corrupt):
                # deleted meanwhile, or no record: then the files alone say what this is
                return
            if isinstance(record, dict) and not record.get("ended"):
                hint = "run the same merge again: it continues"
                raise Incomplete(f"{root}: contains an unfinished merge", hint=hint)

    def sizes(self) -> Mapping[str, int]:
        """Return each file's size in bytes, as it was when the place was listed."""
        return self._sizes

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill ``out`` from byte ``start``.

        Raises:
            Incomplete: the file is not one of `sizes`, or was deleted since.
            Corrupt: the file ends before ``out`` is full.
            StoreError: the disk or the store refuses.

        """
        raise NotImplementedError

    def written(self) -> Mapping[str, float]:
        """Return when each file was last written where it was made, in seconds since 1970.

        Empty where no such times are known: object stores tell when a copy was made, and in a store
        of ours times are those of the upload.
        """
        raise NotImplementedError

    def changed(self) -> tuple[str, ...]:
        """Return the names of files that were replaced, written to or deleted since; list anew.

        Whoever has read from a place that a trainer may write to calls this before using what was
        read. Raise StoreError if the disk or the store refuses.
        """
        raise NotImplementedError

    def holds(self, name: str) -> bool:
        """Return whether a file or directory has this name, also one of `is_no_content`."""
        raise NotImplementedError

    def state(self) -> str:
        """Return a digest of the files' names, sizes, times and inodes, as they were listed."""
        return digest(
            "\n".join(sorted(repr((name, *stamp)) for name, stamp in self._stamps.items())).encode()
        )

    def ignored_entries(self) -> tuple[str, ...]:
        """Return a line for each kind of ignored entry: its first name, how many more, and why."""
        lines = []
        for odd, names in sorted(self._ignored.items()):
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            lines.append(f"{clean(min(names))}{more}: ignored: {_ODD[odd]}")
        return tuple(lines)

    def _list_files(self) -> Mapping[str, Stamp]:
        """Return each file's size, time and inode by name, and call `_ignore` for other entries.

        Raise ConfigError if the place is missing, or a store lists nothing in it; StoreError if it
        cannot be read.
        """
        raise NotImplementedError

    def _read_merge_record(self) -> bytes:
        """Return the bytes of the file `MERGING`; raise NotFound or OSError without one."""
        raise NotImplementedError

    def _ignore(self, name: str, odd: Odd) -> None:
        """Note an entry for `ignored_entries`, unless it is ckptsync's own or unfinished."""
        if not any(map(is_no_content, name.split("/"))):
            self._ignored.setdefault(odd, []).append(name)


class DirectoryFiles(FileTree):
    """The regular files below a directory; links are ignored."""

    def __init__(self, root: str) -> None:
        self._files = OpenFiles()
        super().__init__(str(Path(root).absolute()))

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill ``out`` from byte ``start``; raise as `FileTree.read_into`.

        The file stays open for the next read.
        """
        if name not in self._sizes:
            raise Incomplete(f"{name}: not in {self.root}")
        try:
            file = self._files.get(name)
            if file is None:
                file = self._files.put(name, safe_open.open_file(*self.base_and_name(name)))
            count = file.read_at(start, out)
        except OSError as e:
            if safe_open.is_absence(e):
                raise Incomplete(f"{name}: no longer in {self.root}") from e
            raise _refused(f"{self.root}/{name}", e) from e
        if count < out.nbytes:
            raise too_short(name, start + count, start, out.nbytes)

    def written(self) -> Mapping[str, float]:
        """Return the files' mtimes; nothing if a directory above is a store's (looked up now)."""
        if any((parent / STORE_FILE).is_file() for parent in Path(self.root).parents):
            return {}
        return {name: mtime / 1e9 for name, (_, mtime, _) in self._stamps.items()}

    def changed(self) -> tuple[str, ...]:
        """See `FileTree.changed`."""
        return tuple(
            name for name, stamp in self._stamps.items() if stamp != self._current_stamp(name)
        )

    def holds(self, name: str) -> bool:
        """See `FileTree.holds`."""
        return os.path.lexists(f"{self.root}/{name}")

    def _list_files(self) -> Mapping[str, Stamp]:
        """Return stamps by name; raise ConfigError if there is no such directory, or StoreError."""
        try:
            files = list(safe_open.files_below(self.root, "", is_no_content, self._ignore))
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

    def _current_stamp(self, name: str) -> Stamp | None:
        """Return a file's size, time and inode now, or None if it is gone; raise StoreError."""
        try:
            return _stamp(safe_open.stat_file(*self.base_and_name(name)))
        except OSError as e:
            if safe_open.is_absence(e):
                return None
            raise _refused(f"{self.root}/{name}", e) from e

    def _read_merge_record(self) -> bytes:
        """See `FileTree._read_merge_record`."""
        with os.fdopen(safe_open.open_file(self.root, MERGING), "rb") as file:
            return file.read(MERGING_LIMIT)

    def base_and_name(self, name: str) -> tuple[str, str]:
        """Return the directory that a file is opened below, and its name there."""
        return self.root, name


class SnapshotFiles(DirectoryFiles):
    """The files of a snapshot in Hugging Face's cache, which are links to its blobs.

    ``repository`` is the snapshot's ``models--…``, ``depth`` the number of levels from ``root`` up
    to it. A link is followed to a regular file directly in ``blobs`` there, and to nothing else;
    links are read once, by the constructor.
    """

    def __init__(self, root: str, repository: str, depth: int) -> None:
        self._repository, self._depth = repository, depth
        self._blobs: dict[str, str] = {}
        super().__init__(root)

    def _list_files(self) -> Mapping[str, Stamp]:
        """Return stamps of regular files and linked blobs; raise ConfigError or StoreError.

        Also sets the blobs that `base_and_name` knows.
        """
        stamps = dict(super()._list_files())
        for name in self._ignored.pop("link", ()):
            try:
                blob = self._blob_of_link(name)
                stamp = _stamp(safe_open.stat_file(self._repository, blob)) if blob else None
            except OSError as e:
                if not safe_open.is_absence(e):
                    raise _refused(f"{self.root}/{name}", e) from e
                stamp = None
            if stamp is None:
                self._ignore(name, "link")
            else:
                stamps[name], self._blobs[name] = stamp, blob
        return dict(sorted(stamps.items()))

    def base_and_name(self, name: str) -> tuple[str, str]:
        """Return the repository and the blob for a link, else as `DirectoryFiles`."""
        blob = self._blobs.get(name)
        return (self._repository, blob) if blob else super().base_and_name(name)

    def _blob_of_link(self, name: str) -> str:
        """Return a link's target as ``blobs/…``; empty if it leads elsewhere. Raise OSError."""
        with safe_open.parent_of(self.root, name) as (parent_fd, last):
            target = os.readlink(last, dir_fd=parent_fd)
        to_repository = "../" * (self._depth + name.count("/"))
        blob = target.removeprefix(to_repository)
        is_blob = (
            target.startswith(to_repository) and re.fullmatch(r"blobs/[^/]+", blob) is not None
        )
        return blob if is_blob and safe_open.is_plain_path(blob) else ""


def directory_files(root: str) -> DirectoryFiles:
    """Return the files below a directory that the operator named; raise as `FileTree` does.

    In a snapshot of Hugging Face's cache, links to its blobs are followed (`SnapshotFiles`).
    """
    real = Path(os.path.realpath(root))
    for above in real.parents[1:]:
        parts_below = real.relative_to(above).parts
        if above.name.startswith("models--") and parts_below[0] == "snapshots":
            return SnapshotFiles(root, str(above), len(parts_below))
    return DirectoryFiles(root)


def _stamp(stat: os.stat_result) -> Stamp:
    """Return the `Stamp` of what ``os.stat`` says."""
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def _refused(path: str, e: OSError) -> StoreError:
    """Return the StoreError for a path that the system refuses to read, with the system's words."""
    hint = "run ckptsync as the user who trains" if isinstance(e, PermissionError) else ""
    return StoreError(f"{path}: {(e.strerror or str(e)).lower()}", hint=hint)


class ListedFiles(FileTree):
    """All files that a store lists; ``root`` is the store's URL.

    ``is_dated``: the store keeps the times that files had where they were written; without it
    `written` is empty. The constructor also raises ConfigError if the store lists nothing.
    """

    def __init__(self, store: Store, *, is_dated: bool = False) -> None:
        self._store, self._is_dated = store, is_dated
        self._listed_names: frozenset[str] = frozenset()
        super().__init__(store.url)

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill ``out`` from byte ``start``; raise as `FileTree.read_into`."""
        if name not in self._sizes:
            raise Incomplete(f"{name}: not in {self.root}")
        try:
            self._store.read_into(name, start, out)
        except NotFound as e:
            raise Incomplete(f"{name}: no longer in {self.root}") from e

    def written(self) -> Mapping[str, float]:
        """Return the files' mtimes if the store keeps a trainer's times, else nothing."""
        return (
            {name: mtime for name, (_, mtime, _) in self._stamps.items()} if self._is_dated else {}
        )

    def changed(self) -> tuple[str, ...]:
        """List the store again; see `FileTree.changed`.

        Stamps of a store have no inode to compare.
        """
        current = {entry.name: (entry.size, entry.mtime, 0) for entry in self._store.names("")}
        return tuple(name for name, stamp in self._stamps.items() if current.get(name) != stamp)

    def holds(self, name: str) -> bool:
        """See `FileTree.holds`; as the store was when it was listed."""
        return name in self._listed_names

    def _list_files(self) -> Mapping[str, Stamp]:
        """Return stamps by name; raise ConfigError if nothing is listed, or StoreError.

        Also sets the names that `holds` knows.
        """
        store = self._store
        if not has_root(store):
            raise ConfigError(
                f"{self.root}: no such directory, a checkpoint's directory expected",
                hint="check the path",
            )
        entries = list(
            store.names_reporting(self._ignore) if isinstance(store, Rooted) else store.names("")
        )
        if not entries and "link" not in self._ignored:
            raise ConfigError(
                f"{self.root}: nothing found, a checkpoint's directory expected",
                hint="check the URL",
            )
        self._listed_names = frozenset(entry.name for entry in entries)
        content = (entry for entry in entries if not any(map(is_no_content, entry.name.split("/"))))
        return {entry.name: (entry.size, entry.mtime, 0) for entry in content}

    def _read_merge_record(self) -> bytes:
        """See `FileTree._read_merge_record`."""
        return read_all(self._store, MERGING, MERGING_LIMIT)


class Overlay:
    """The union of several trees; where a name is in several, the first tree is read."""

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
        """Fill ``out`` from the first tree that has ``name``; raise Incomplete if none has."""
        if name not in self._owners:
            raise Incomplete(f"{name}: not found in any of the given directories or URLs")
        self._owners[name][0].read_into(name, start, out)

    def duplicates(self, name: str) -> tuple[Files, ...]:
        """Return the trees that have ``name``, in the order in which they were passed.

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
    """Files of a store under a checkpoint's own names: ``{path: (name in the store, size)}``.

    Nothing is listed; sizes are those that a manifest records.
    """

    def __init__(self, store: Store, where: Mapping[str, tuple[str, int]]) -> None:
        self._store, self._where = store, dict(where)
        self._sizes = {path: size for path, (_, size) in sorted(self._where.items())}

    def sizes(self) -> Mapping[str, int]:
        return self._sizes

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill ``out`` from the stored file; raise Incomplete if no manifest names ``name``."""
        if name not in self._where:
            raise Incomplete(f"{name}: not named by any manifest")
        try:
            self._store.read_into(self._where[name][0], start, out)
        except NotFound as e:
            raise Incomplete(f"{name}: not in the store as {self._where[name][0]}") from e


class TopFiles:
    """The files directly in a directory of this machine, with their sizes at construction.

    ``follows_links``: true for a directory that the operator named, since a Hugging Face snapshot
    is made of links; false for one that ckptsync looked up by itself. The constructor raises
    ConfigError if the directory cannot be read.
    """

    def __init__(self, root: str, *, follows_links: bool) -> None:
        """List the directory; raise ConfigError if it cannot be read."""
        try:
            with os.scandir(root) as entries:
                files = [entry for entry in entries if entry.is_file(follow_symlinks=follows_links)]
            self._paths = {
                file.name: os.path.realpath(file.path) if follows_links else file.path
                for file in files
            }
            self.stamps = {
                name: _stamp(os.lstat(path)) for name, path in sorted(self._paths.items())
            }
        except OSError as e:
            hint = "a directory with config.json and tokenizer files is expected"
            raise ConfigError(f"{root}: {(e.strerror or str(e)).lower()}", hint=hint) from e
        self.root = root
        self._sizes = {name: size for name, (size, _, _) in self.stamps.items()}

    def sizes(self) -> Mapping[str, int]:
        return self._sizes

    def changed(self) -> tuple[str, ...]:
        """Return the names of files that were replaced, changed or deleted since construction."""
        return tuple(
            name for name, stamp in self.stamps.items() if stamp != self._current_stamp(name)
        )

    def _current_stamp(self, name: str) -> Stamp | None:
        """Return a file's size, time and inode now; None if it is gone or access is denied."""
        try:
            return _stamp(os.lstat(self._paths[name]))
        except OSError:
            return None

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill ``out`` from byte ``start``.

        Raise Incomplete if the name was not listed, Corrupt if the file became shorter, OSError.
        """
        if name not in self._paths:
            raise Incomplete(f"{name}: not found")
        fd = os.open(self._paths[name], os.O_RDONLY | os.O_NOFOLLOW)
        try:
            if safe_open.read_at(fd, start, out) < out.nbytes:
                raise Corrupt(f"{self._paths[name]}: became shorter while it was read")
        finally:
            os.close(fd)
