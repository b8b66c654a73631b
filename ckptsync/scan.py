"""Which checkpoints lie in an output directory, whoever wrote them.  A scan is the truth; events only say when to scan."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ckptsync.digest import digest
from ckptsync.errors import ConfigError, StoreError
from ckptsync.walk import Listing, Stat, walk

Family = Literal["trainer", "accelerate", "deepspeed", "dcp", "verl", "lightning", "final"]
_STATES = re.compile(r"(bf16_|fp16_)?(zero_pp_rank_\d+_)?mp_rank_\d+_(model|optim)_states\.pt")
_DCP = re.compile(r"\.metadata|__\d+_\d+\.distcp|.+\.safetensors(\.index\.json)?")
_NUMBERED: tuple[tuple[re.Pattern[str], Family], ...] = (
    (re.compile(r"checkpoint-[0-9]{1,18}"), "trainer"),
    (re.compile(r"checkpoint_[0-9]{1,18}"), "accelerate"),
    (re.compile(r"step-[0-9]{1,18}"), "dcp"),
)
NESTED = ("checkpoints", "checkpoint")  # accelerate's projects, torchtitan's dump folder
_RESERVED = ("consolidated", "final", *NESTED)
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a checkpoint lies.  ``name`` is its place in a store: one plain path component."""

    name: str
    family: Family
    path: Path

    @property
    def step(self) -> int | None:
        """The number at the end of the name."""
        found = re.search(r"([0-9]{1,18})$", self.name)
        return int(found[1]) if found else None


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint as it lies on disk at this moment; `ckptsync.walk.Listing` says what is and is not counted."""

    name: str
    family: Family
    path: Path
    files: tuple[Stat, ...]
    partial: tuple[Stat, ...]
    others: tuple[str, ...]


def scan(output_dir: Path) -> tuple[Found, ...]:
    """Every checkpoint in ``output_dir``, by name.  Raises ConfigError where something may not be read."""
    return tuple(found(s) for s in spots(output_dir))


def found(spot: Spot) -> Found:
    """A closer look at one of them; a checkpoint that has vanished has no files."""
    below: Listing = walk(spot.path)
    return Found(spot.name, spot.family, spot.path, below.files, below.partial, below.others)


def spots(output_dir: Path) -> tuple[Spot, ...]:
    """Where checkpoints lie, without looking into them further than to know their family."""
    ordered: dict[str, Spot] = {}
    for spot in (*_top(output_dir), *_nested(output_dir)):
        name = spot.name if spot.name not in ordered else _joined(output_dir, spot.path)
        ordered[name] = Spot(name, spot.family, spot.path)
    return tuple(ordered[name] for name in sorted(ordered))


def spot_at(directory: Path) -> Spot | None:
    """``directory`` itself as a checkpoint, or ``None`` if nothing says that it is one."""
    path = directory.resolve()
    return _spot(path.parent, path.name)


def family_of(name: str) -> Family:
    """Whose checkpoint has such a name; a tag may have any."""
    return next((family for pattern, family in _NUMBERED if pattern.fullmatch(name)), "deepspeed")


def _top(output_dir: Path) -> Iterator[Spot]:
    for name in _folders(output_dir):
        spot = None if name in NESTED else _spot(output_dir, name)
        if spot is not None:
            yield spot


def _nested(output_dir: Path) -> Iterator[Spot]:
    inside = set(_folders(output_dir))
    for folder in NESTED:
        for name in _folders(output_dir / folder) if folder in inside else ():
            spot = _spot(output_dir / folder, name)
            if spot is not None and spot.family != "deepspeed":
                yield spot


def _spot(parent: Path, name: str) -> Spot | None:
    path = parent / name
    for pattern, family in _NUMBERED:
        if pattern.fullmatch(name) and (family != "dcp" or _holds(path, _DCP)):
            return Spot(name, family, path)
    return Spot(_plain(name), "deepspeed", path) if _holds(path, _STATES) else None


def _holds(path: Path, pattern: re.Pattern[str]) -> bool:
    return any(pattern.fullmatch(name) for name in _names(path))


def _plain(tag: str) -> str:
    """A tag as one component of a store's names; a tag that is none keeps its letters and gets a digest."""
    if _PLAIN.fullmatch(tag) and tag not in _RESERVED:
        return tag
    return f"tag-{re.sub(r'[^A-Za-z0-9_.-]', '_', tag)[:80]}.{digest(os.fsencode(tag))[:8]}"


def _joined(output_dir: Path, path: Path) -> str:
    return ".".join(path.relative_to(output_dir).parts)


def _folders(path: Path) -> list[str]:
    return [n for n in _names(path) if not n.startswith(("_", ".")) and _is_folder(path / n)]


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _names(path: Path) -> list[str]:
    """Sorted; none where the directory has vanished."""
    try:
        return sorted(entry.name for entry in path.iterdir())
    except (FileNotFoundError, NotADirectoryError):  # rotation is quicker than we are, and that is its right
        return []
    except PermissionError as e:
        raise ConfigError(f"{path}: may not be read by uid {os.geteuid()}", hint="run the worker as the user who trains") from e
    except OSError as e:
        raise StoreError(f"{path}: {e.strerror}") from e
