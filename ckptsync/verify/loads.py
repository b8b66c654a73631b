"""Level load over several files: what the children say, as findings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckptsync.records.report import Finding
from ckptsync.verify.loading import Loaded, descriptor, limits, load
from ckptsync.verify.reading import Reads


@dataclass(frozen=True, slots=True)
class Part:
    """A file to load: the source's name for it, a report's, and its size."""

    name: str
    shown: str
    size: int


def loads(source: Reads, parts: Sequence[Part], where: str) -> tuple[list[Finding], int]:
    """Load every safetensors file among ``parts``; findings, and the bytes that were loaded.

    Raises Unsupported where no loader is installed, Incomplete if a file went away, StoreError.
    """
    loadable = [part for part in parts if part.name.endswith(".safetensors")]
    done = [(part, _load(source, part)) for part in loadable]
    findings = [finding for part, loaded in done for finding in _findings(part, loaded)]
    return [*findings, _summary([loaded for _, loaded in done], where)], sum(loaded.read for _, loaded in done)


def _load(source: Reads, part: Part) -> Loaded:
    with descriptor(source, part.name, part.size) as fd:
        return load(fd, limits(part.size))


def _findings(part: Part, loaded: Loaded) -> Iterator[Finding]:
    if loaded.fault:
        yield Finding("load", part.shown, loaded.fault)
    for name, count in loaded.nonfinite:
        yield Finding("nonfinite", part.shown, f"{name}: {count} values are not finite", tensors=(name,))
    if loaded.more:
        yield Finding("nonfinite", part.shown, f"{loaded.more} more tensors have values that are not finite")


def _summary(done: Sequence[Loaded], where: str) -> Finding:
    loaders = sorted({loaded.loader for loaded in done if loaded.loader})
    if not done:
        return Finding("note", where, "nothing to load: there is no safetensors file (shards are loaded as the consolidated model)")
    tensors = sum(loaded.tensors for loaded in done)
    return Finding("note", where, f"{tensors} tensors of {len(done)} files loaded with {' and '.join(loaders) or 'nothing'}")
