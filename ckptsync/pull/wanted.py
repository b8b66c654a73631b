"""What of a checkpoint a machine wants: which stored files, under which names, with which times.  Pure."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ckptsync.digest import FileDigest, digest
from ckptsync.errors import ConfigError, Corrupt, Incomplete
from ckptsync.formats.dtypes import ITEMSIZE
from ckptsync.formats.safetensors import encode_header
from ckptsync.layouts import rank_names
from ckptsync.paths import checked_path
from ckptsync.pull.pointers import pointers
from ckptsync.records.manifest import FileEntry
from ckptsync.records.names import consolidated_prefix
from ckptsync.records.saves import Located
from ckptsync.records.seal import SealedFile, SealedTensor
from ckptsync.records.state import Snapshot
from ckptsync.stores.arrival import Wanted
from ckptsync.stores.proof import Stretches

_OF_ALL = re.compile(
    r"__[0-9]+_[0-9]+\.distcp|__[0-9]+\.metadata|shard-[0-9]+-model-.*"
)  # shards of which any rank may need a part
_COMPONENT = re.compile(r"[A-Za-z0-9][^/]*")


@dataclass(frozen=True, slots=True)
class Order:
    """``name``: of the directory.  ``times``: path → mtime in ns, where they are known.  ``pointers``: files beside the directory.

    ``lacking``: files of the checkpoint that are not in the store, and why; ``notes``: what else should be known.
    """

    name: str
    files: tuple[Wanted, ...]
    times: Mapping[str, int] = field(default_factory=dict)
    pointers: Mapping[str, bytes] = field(default_factory=dict)
    lacking: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(f.size for f in self.files)

    @property
    def key(self) -> str:
        """The same for the same files with the same bytes, 16 hex digits."""
        told = [f"{f.under}\0{f.size}\0{f.digest.digest if f.digest else ''}" for f in self.files]
        return digest("\n".join(sorted(told)).encode())[:16]


def whole(seen: Snapshot, node: str = "") -> Order:
    """All files of a checkpoint, or those that ``node`` needs to resume; raises ConfigError if it sent none, Corrupt for names that cannot be.

    A node needs its own files, in its own content, and every file that is of no rank or of which any rank may need a part; not the optimizer shards
    and random states of others.
    """
    if node and node not in (nodes := sorted({k.manifest.node for k in seen.manifests})):
        raise ConfigError(f"{node}: no node that sent files of {seen.run}/{seen.place}", hint=f"there are: {', '.join(nodes)}")
    chosen = {path: at for path, where in seen.files.items() if (at := _for(node, path, where))}
    there = {path: at for path, at in chosen.items() if seen.sizes.get(at.name) == at.entry.size}
    _check_names(seen.checkpoint, there)
    return Order(
        seen.checkpoint,
        tuple(Wanted(at.name, path, at.entry.size, _digest(at.entry)) for path, at in there.items()),
        {path: at.entry.mtime for path, at in there.items()},
        pointers(seen.checkpoint, there),
        tuple(_lacking(seen, chosen, there, node)),
        tuple(_notes(seen, node)),
    )


def model(seen: Snapshot) -> Order:
    """The consolidated model, each byte proven by what its seal says; raises Incomplete where there is none."""
    seal = seen.seal
    if seal is None:
        raise Incomplete(f"{seen.run}/{seen.place}: it has not been consolidated", hint="a head does, or `ckptsync merge`")
    prefix = consolidated_prefix(seal.run, seal.place)
    there = [f for f in seal.files if seen.sizes.get(prefix + f.path) == f.size]
    tensors: dict[str, list[SealedTensor]] = {}
    for tensor in seal.tensors:
        tensors.setdefault(tensor.file, []).append(tensor)
    _check_names(seen.checkpoint, [f.path for f in there])
    return Order(
        seen.checkpoint,
        tuple(Wanted(prefix + f.path, f.path, f.size, stretches(f, tensors.get(f.path, ()))) for f in there),
        lacking=tuple(f"{f.path}: not in the store as it was sealed" for f in seal.files if f not in there),
    )


def stretches(file: SealedFile, tensors: Sequence[SealedTensor]) -> Stretches:
    """So that several ranges of a large file can be proven at once: its header, which can be told from its tensors, then each tensor."""
    ordered = sorted((t for t in tensors if t.size), key=lambda t: t.start)
    header = encode_header((t.name, t.dtype, t.shape) for t in tensors) if all(t.dtype in ITEMSIZE for t in tensors) else b""
    ends = (len(header), *(t.start + t.size for t in ordered))
    is_told = ordered and ends[-1] == file.size and all(a == t.start and t.digest for a, t in zip(ends, ordered, strict=False))
    if not is_told:
        return Stretches(file.size, file.digest, (file.size,), (file.digest,))
    return Stretches(file.size, file.digest, ends, (digest(header), *(t.digest for t in ordered)))


def _for(node: str, path: str, where: tuple[Located, ...]) -> Located | None:
    own = next((at for at in where if node in at.nodes), None)
    if not node or own:
        return own or where[0]
    return None if _is_of_one_rank(path) else where[0]


def _is_of_one_rank(path: str) -> bool:
    """Whether no other rank has a use for it."""
    return rank_names.rank(path) is not None and not _OF_ALL.fullmatch(path.rpartition("/")[2])


def _digest(entry: FileEntry) -> FileDigest:
    return FileDigest(entry.size, entry.digest, entry.block_size, entry.blocks)


def _lacking(seen: Snapshot, chosen: Mapping[str, Located], there: Mapping[str, Located], node: str) -> Iterator[str]:
    for path, at in chosen.items():
        if path not in there:
            yield f"{path}: not in the store as {at.nodes[0]} has sent it"
    for path in sorted({**seen.demands.model, **seen.demands.resume}.keys() - seen.files.keys()):
        if not node or not _is_of_one_rank(path):
            yield f"{path}: no node has sent it"


def _notes(seen: Snapshot, node: str) -> Iterator[str]:
    others = sorted({at.nodes[0] for where in seen.files.values() for at in where[1:]} if not node else ())
    for other in others:
        count = sum(other in at.nodes for where in seen.files.values() for at in where[1:])
        yield f"{count} files of {other} have other bytes than those of the same name that are given: --node {other} gives them"


def _check_names(checkpoint: str, paths: Iterable[str]) -> None:
    """Raises Corrupt for names that would land elsewhere, or on each other where letters' case or accents' spelling makes no difference."""
    if not _COMPONENT.fullmatch(checked_path(checkpoint)):
        raise Corrupt(f"{checkpoint!r}: not a checkpoint's name")
    folded: dict[str, str] = {}
    for path in paths:
        key = _folded(checked_path(path))
        if key in folded:
            raise Corrupt(f"{path}: on some file systems the same file as {folded[key]}", hint="a trainer writes no such names")
        folded[key] = path
    for key, path in folded.items():
        parts = key.split("/")
        if above := next((a for n in range(1, len(parts)) if (a := "/".join(parts[:n])) in folded), ""):
            raise Corrupt(f"{path}: lies in {folded[above]}, which is a file")


def _folded(path: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", path).casefold())
