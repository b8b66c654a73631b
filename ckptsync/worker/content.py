"""Contents on their way into a store, and whether they are there: files that this node holds, and what the store has under another name.

Both can be iterated over again, each time from the beginning, so that a write that failed can be tried again; and both raise at the end if they
were not the bytes that they should be: then nothing appears.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterable, Iterator

from blake3 import blake3

from ckptsync.digest import Digester, block_size, digest
from ckptsync.errors import Corrupt, NotFound
from ckptsync.records.manifest import FileEntry
from ckptsync.stores import ending
from ckptsync.stores.contract import About, Store
from ckptsync.stores.writing import chunk_room
from ckptsync.worker.snapshot import AGAIN, CHUNK, Changed, Held, Passed, chunks, nothing, unread

_FICLONE = 0x40049409  # linux/fs.h, ioctl_ficlone(2)


class Source:
    """A file of this node, one of ``files``.  ``entry`` has its digest from the end of the first whole pass on, if it had none before."""

    def __init__(self, held: Held, node: str, entry: FileEntry | None = None, passed: Passed = nothing, files: int = 1) -> None:
        self.entry = entry or unread(held.stat)
        self.about = About(held.stat.size, _origin(node, held.stat.path, held.stat.size, held.stat.mtime), self._share)
        self._held, self._passed, self._files = held, passed, files
        self._clone: int | None = None
        self._told = self.entry.size if self.entry.digest else 0

    def __iter__(self) -> Iterator[memoryview]:
        if self._told:
            self._tell(-self._told)
        stream = self._stream()
        yield from checked(stream, self.entry, self._held.stat.path) if self.entry.digest else self._digested(stream)

    def digested(self) -> FileEntry:
        """The entry; reads the file if nobody has."""
        if not self.entry.digest:
            for _ in self:
                pass
        return self.entry

    def _stream(self) -> Iterator[memoryview]:
        clone, self._clone = self._clone, None
        try:
            yield from chunks(self._held, self._tell, clone)
        finally:
            if clone is not None:
                os.close(clone)

    def _share(self, fd: int) -> None:
        """As `About` says.  The copy is of one moment, before which and after which the file is looked at: so it is the file of that look."""
        source = self._held.open()
        try:
            fcntl.ioctl(fd, _FICLONE, source)
            # not a copy of the descriptor: the store reads behind us to compare, and reading ahead is told apart by open files
            self._clone = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
        except OSError:
            return  # another file system than the store's, or one whose files share nothing: it is read and written
        finally:
            os.close(source)

    def _digested(self, stream: Iterable[memoryview]) -> Iterator[memoryview]:
        size = self._held.stat.size
        digester = Digester(size, block_size(size, self._files))
        for chunk in stream:
            digester.update(chunk)
            yield chunk
        found = digester.result()
        self.entry = FileEntry(self.entry.path, found.size, found.digest, found.block_size, found.blocks, self.entry.mtime)

    def _tell(self, count: int) -> None:
        self._told += count
        self._passed(count)


class Guarded:
    """Chunks, and a last word before the store gives them their name: it may raise."""

    def __init__(self, chunks: Iterable[memoryview], last: Callable[[], None]) -> None:
        self._chunks, self._last = chunks, last

    def __iter__(self) -> Iterator[memoryview]:
        yield from self._chunks
        self._last()


class Stored:
    """What a store has under ``name``, to be written under another name, too."""

    def __init__(self, store: Store, name: str, entry: FileEntry, node: str, passed: Passed = nothing) -> None:
        self.about = About(entry.size, _origin(node, entry.digest))
        self.entry = entry
        self._store, self._name, self._passed = store, name, passed

    def __iter__(self) -> Iterator[memoryview]:
        return checked(stored_chunks(self._store, self._name, self.entry.size, self._passed), self.entry, self._name)

    def digested(self) -> FileEntry:
        """The entry, as of `Source`."""
        return self.entry


def checked(stream: Iterable[memoryview], entry: FileEntry, name: str) -> Iterator[memoryview]:
    """The chunks themselves; raises Changed at the end unless they were the bytes of ``entry``."""
    found, size = blake3(), 0
    for chunk in stream:
        found.update(chunk)
        size += len(chunk)
        yield chunk
    if (size, found.hexdigest()) != (entry.size, entry.digest):
        raise Changed(f"{name}: these are not the bytes that were taken", hint=AGAIN)


def stored_chunks(store: Store, name: str, size: int, passed: Passed = nothing) -> Iterator[memoryview]:
    """A stored file, a chunk at a time in one buffer that is used again.  ``passed`` is told that time passes, and no bytes."""
    buffer = chunk_room(min(CHUNK, size))
    for start in range(0, size, CHUNK):
        ending.go_on(name)
        piece = buffer[: min(CHUNK, size - start)]
        store.read_into(name, start, piece)
        yield piece
        passed(0)


def is_stored(store: Store, name: str, entry: FileEntry, passed: Passed = nothing) -> bool | None:
    """Whether ``name`` holds the bytes of ``entry``; ``None`` if there is no such name.  Reads them."""
    try:
        if store.size(name) != entry.size:
            return False
        found = blake3()
        for chunk in stored_chunks(store, name, entry.size, passed):
            found.update(chunk)
    except NotFound:
        return None
    except Corrupt:  # it shrank meanwhile: somebody is writing it
        return False
    return found.hexdigest() == entry.digest


def _origin(*parts: object) -> str:
    """The same for the same node and bytes after a restart; never another node's, who would end an upload that this one is sending."""
    return digest("\n".join(map(str, parts)).encode("utf-8", "surrogateescape"))[:32]
