"""Before a merge: what is asked for is looked at wherever it lies, here or in a store elsewhere, and planned."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ckptsync.errors import ConfigError, Corrupt
from ckptsync.merge.dated import check_dates
from ckptsync.merge.one_save import Judge, check_duplicates, check_saves, check_steps, remarks
from ckptsync.merge.output import DAMAGED, NAMES, parsed
from ckptsync.merge.plan import Options
from ckptsync.merge.prepare import Job, prepare
from ckptsync.model import Extent, Files, read
from ckptsync.stores import trees
from ckptsync.stores.tree import Overlay, Tree
from ckptsync.stores.trees import Access, Place
from ckptsync.stores.urls import Remote

# Directories whose parent is the checkpoint, or the run: where configuration and tokenizer may lie.
_INNER = re.compile(r"(checkpoint|step|epoch|iter|global_step|pytorch_model|pytorch_model_fsdp)([-_]?[0-9]+)*|checkpoints")
_LARGE_JSON = 1 << 20


@dataclass(frozen=True, slots=True)
class Asked:
    """What an operator wants merged: ``sources`` are of one checkpoint, one a node."""

    sources: Sequence[Place]
    destination: Place
    options: Options
    config_from: Place | None = None
    base: Place | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A merge that can be done; nothing is written yet.  ``files`` are those of all ``trees``."""

    asked: Asked
    job: Job
    files: Files
    trees: tuple[Tree, ...]

    @property
    def destination(self) -> Place:
        """Where the model is to be."""
        return self.asked.destination


def look(asked: Asked, access: Access, judge: Judge = check_dates) -> Prepared:
    """Look at everything, the files' times too (``judge``), and plan.  Raises ConfigError, Incomplete, Unsupported, Corrupt or StoreError."""
    check_apart(asked)
    check_steps([trees.path(trees.real(source)) for source in asked.sources])
    found = tuple(trees.tree(source, access) for source in asked.sources)
    overlay = Overlay(found)
    files = trees.near(overlay, asked.sources)
    code_from = trees.named(asked.config_from, access) if asked.config_from else None
    named = [(told(asked.config_from), code_from)] if asked.config_from and code_from else []
    config = [*named, *_surroundings(asked.sources, access)]
    compared = trees.named(asked.base, access) if asked.base else None
    job = prepare(files, asked.options, [place for _, place in config], compared, code_from)
    origins = [*config, *([(told(asked.base), compared)] if asked.base and compared else [])]
    job = replace(job, notes=(*job.notes, *_origins(job, origins), *remarks(found, job)))
    check_duplicates(overlay, job)
    check_saves(found, job, judge)
    for name, place in job.beside:
        _check_beside(place, name)
    return Prepared(asked, job, files, found)


def told(place: Place) -> str:
    """As messages name it."""
    return place.url if isinstance(place, Remote) else str(place)


def check_apart(asked: Asked) -> None:
    """Raise ConfigError for a destination inside a source."""
    destination = trees.real(asked.destination)
    for source in asked.sources:
        if trees.is_inside(destination, trees.real(source)):
            raise ConfigError(
                f"{told(asked.destination)}: inside the checkpoint {told(source)}",
                hint="a trainer's directory is never written to: name one beside it",
            )


def _surroundings(sources: Sequence[Place], access: Access) -> list[tuple[str, Files]]:
    """The checkpoint around an inner directory of shards, and the run around a checkpoint: where it is, and its files."""
    found: list[tuple[str, Files]] = []
    for source in sources:
        place = trees.real(source)
        while _INNER.fullmatch(trees.path(place).name) and (above := trees.parent(place)):
            place = above
            found.append((told(place), trees.around(place, access, NAMES)))
    return found


def _origins(job: Job, places: Sequence[tuple[str, Files]]) -> Iterator[str]:
    """Where the files beside the weights come from, if not from the checkpoint itself."""
    for path, place in places:
        if names := [name for name, found in job.beside if found is place]:
            yield f"from {path}: {', '.join(names)}"


def _check_beside(place: Files, name: str) -> None:
    """A model beside a damaged configuration cannot be opened; large files (tokenizers) are only looked at where they end."""
    size = place.sizes()[name]
    if not name.endswith(".json"):
        return
    is_large = size > _LARGE_JSON
    data = read(place, Extent(name, size - 64, 64) if is_large else Extent(name, 0, size))
    if is_large and not data.rstrip().endswith((b"}", b"]")):
        raise Corrupt(f"{name}: not JSON: no end", hint=DAMAGED)
    if not is_large:
        parsed(name, data)
