"""Files of a consolidated model as they get their names: never over other bytes, unless those are what a model record says that they should be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from blake3 import blake3

from ckptsync.digest import digest
from ckptsync.errors import Corrupt, Exists, NotFound
from ckptsync.merge.consolidate import Chunk
from ckptsync.records.model_record import ModelFile
from ckptsync.stores.contract import UNKNOWN, About, Store

PIECE = 4 << 20


class InTheWay(Exception):
    """Other bytes lie under this name, which no model record binds."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class Writing:
    """Creates files below ``prefix``; ``abouts``: what is known of some of them beforehand."""

    def __init__(self, store: Store, prefix: str, abouts: Mapping[str, About]) -> None:
        self._store, self._prefix, self._abouts = store, prefix, abouts

    def put(self, name: str, chunks: Iterable[Chunk]) -> None:
        """Raises InTheWay.  Where the very same bytes are already, as after a crash or from another head, nothing is written."""
        digested = _Digested(chunks)
        full = self._prefix + name
        try:
            self._store.create(full, iter(digested), self._abouts.get(name, UNKNOWN))
        except Exists as e:
            if e.is_same:
                return
            for _ in digested:
                pass
            if e.is_same is not None or not is_whole(self._store, full, ModelFile(name, digested.size, digested.digest)):
                raise InTheWay(full) from None


def placed(store: Store, name: str, data: bytes) -> bool:
    """Put a small file under its name; return whether these bytes lie there now, and not others that somebody has put there first."""
    try:
        store.create(name, [data])
    except Exists as e:
        return e.is_same if e.is_same is not None else is_whole(store, name, ModelFile(name, len(data), digest(data)))
    return True


def is_whole(store: Store, name: str, file: ModelFile) -> bool:
    """Whether these very bytes lie there."""
    digester = blake3()
    try:
        if store.size(name) != file.size:
            return False
        buffer = memoryview(bytearray(min(PIECE, file.size)))
        for at in range(0, file.size, PIECE):
            piece = buffer[: min(PIECE, file.size - at)]
            store.read_into(name, at, piece)
            digester.update(piece)
    except (NotFound, Corrupt):  # gone, or shorter than it was a moment ago
        return False
    return digester.hexdigest() == file.digest


def proven(chunks: Iterable[Chunk], file: ModelFile) -> Iterator[Chunk]:
    """The chunks; raises Corrupt after the last one, so that nothing appears, if they are not the consolidated bytes."""
    digester = blake3()
    for chunk in chunks:
        digester.update(chunk)
        yield chunk
    if digester.hexdigest() != file.digest:
        raise Corrupt(
            f"{file.path}: made again, it is not what the model record says", hint="its configuration, or this program, has changed"
        )


class _Digested:
    """Chunks, each given once, and what they were."""

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        self._chunks = iter(chunks)
        self._digester = blake3()
        self.size = 0

    def __iter__(self) -> Iterator[Chunk]:
        for chunk in self._chunks:
            self._digester.update(chunk)
            self.size += memoryview(chunk).nbytes
            yield chunk

    @property
    def digest(self) -> str:
        return self._digester.hexdigest()
