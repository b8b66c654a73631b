"""Level load over several files: which are loaded, and how; what the child says, as findings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptsync.model import Files
from ckptsync.records.report import Finding, Reading
from ckptsync.verify import archives
from ckptsync.verify.archives import ITEMS, TORCH, Item, Items
from ckptsync.verify.loading import Kind, Loaded, descriptor, limits, load, loading
from ckptsync.verify.process import Loader
from ckptsync.verify.reading import Reads, Told
from ckptsync.verify.structure import UNLOADED


@dataclass(frozen=True, slots=True)
class Part:
    """A file to load: the source's name for it, a report's, its size, and its path in the checkpoint (empty: it is in no checkpoint)."""

    name: str
    shown: str
    size: int
    path: str = ""


@dataclass(frozen=True, slots=True)
class _Way:
    """How a file is loaded; or, in ``note``, why it is not."""

    kind: Kind = "safetensors"
    items: Sequence[Item] = ()
    note: str = ""


def loads(
    source: Reads, parts: Sequence[Part], where: str, checkpoint: Files, told: Told = lambda _: None
) -> tuple[list[Finding], Reading]:
    """Load every file among ``parts`` that has tensors; ``checkpoint`` says where in its shards these lie.

    Raises Unsupported where no loader is installed, Incomplete if a file went away, StoreError.
    """
    items = archives.items(checkpoint) if any(part.name.endswith(ITEMS) for part in parts) else {}
    ways = [(part, way) for part in parts if (way := _way(part, items))]
    findings = [Finding("note", part.shown, f"{UNLOADED}{way.note}") for part, way in ways if way.note]
    done: list[tuple[Part, Loaded]] = []
    with loading(told) as child:
        for part, way in ways:
            if not way.note:
                done.append((part, _load(child, source, part, way)))
    findings += [finding for part, loaded in done for finding in _findings(part, loaded)]
    return [*findings, _summary([loaded for _, loaded in done], where)], _reading(ways, done)


def _way(part: Part, items: Mapping[str, Items]) -> _Way | None:
    """``None`` for what holds no tensors."""
    if part.name.endswith(".safetensors"):
        return _Way()
    if part.name.endswith(TORCH):
        return _Way("torch")
    if not part.name.endswith(ITEMS):
        return None
    if (its := items.get(part.path)) is None:
        return _Way(note="no .metadata that could be read says where in it tensors lie")
    return _Way(note="it is compressed") if its.is_packed else _Way("items", its.items)


def _load(child: Loader, source: Reads, part: Part, way: _Way) -> Loaded:
    with descriptor(source, part.name, part.size) as fd:
        return load(child, fd, way.kind, limits(part.size), way.items)


def _findings(part: Part, loaded: Loaded) -> Iterator[Finding]:
    if loaded.fault:
        yield Finding("load", part.shown, loaded.fault)
    if loaded.refused:
        yield Finding("note", part.shown, f"{UNLOADED}{loaded.refused}")
    for name, count in loaded.nonfinite:
        yield Finding("nonfinite", part.shown, f"{name}: {count} values are not finite", tensors=(name,))
    if loaded.more:
        yield Finding("nonfinite", part.shown, f"{loaded.more} more tensors have values that are not finite")


def _summary(done: Sequence[Loaded], where: str) -> Finding:
    loaders = sorted({loaded.loader for loaded in done if loaded.loader})
    if not done:
        return Finding("note", where, "nothing to load: no file with tensors")
    tensors = sum(loaded.tensors for loaded in done)
    return Finding("note", where, f"{tensors} tensors of {len(done)} files loaded with {' and '.join(loaders) or 'nothing'}")


def _reading(ways: Sequence[tuple[Part, _Way]], done: Sequence[tuple[Part, Loaded]]) -> Reading:
    """Of the files with tensors."""
    whole = [(part, loaded) for part, loaded in done if not (loaded.fault or loaded.refused)]
    return Reading(
        "load",
        files=len(whole),
        size=sum(loaded.read for _, loaded in whole),
        of_files=len(ways),
        of_size=sum(part.size for part, _ in ways),
        tensors=sum(loaded.tensors for _, loaded in whole),
    )
