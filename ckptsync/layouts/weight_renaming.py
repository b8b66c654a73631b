"""Find where a tensor of a model's files is in memory: transformers renames and fuses tensors.

Checkpoints hold the names of a model in memory; ``save_pretrained``, hubs and vLLM use the names of
files. `places` goes from files to memory, as transformers does when it loads: in this direction
every change has one result. The changes are in `weight_renaming_table`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ckptsync.layouts.weight_renaming_table import FAMILIES

_EVERY = "every"  # the family of all models: what older files have
_MOST_CONFIGS = 16
# Where transformers' classes keep the model that a section of the configuration describes.
_SCOPES: Mapping[str, tuple[str, ...]] = {
    "text_config": ("model.language_model.", "language_model.", "model.text_model.", "model."),
    "vision_config": ("model.vision_tower.", "vision_tower.", "model.visual.", "vision_model."),
    "audio_config": ("model.audio_tower.", "audio_tower."),
}
_ROOT = ("",)


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a file's tensor in memory, at the tensor ``live`` of the model.

    The file's tensor is ``live``, or a piece of it, or contains it. ``expert``: its index on the
    first axis of ``live``, an axis that the file's tensor does not have. ``piece``: it is this one
    of ``pieces`` tensors that follow each other on the first axis of ``live``, or of one expert of
    it. ``part``: ``live`` is this one of ``parts`` that follow each other on the first axis of the
    file's tensor. ``may_transpose``: the file has the last two axes swapped, unless its shape is
    that in memory.
    """

    live: str
    expert: int | None = None
    piece: int = 0
    pieces: int = 1
    part: int = 0
    parts: int = 1
    may_transpose: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether the file's tensor is all of ``live`` and nothing else."""
        return self.expert is None and self.pieces == self.parts == 1


@dataclass(frozen=True, slots=True)
class _Change:
    """A line of the table: patterns of names in files, and names in memory."""

    patterns: tuple[re.Pattern[str], ...]
    names: tuple[str, ...]
    is_conversion: bool
    may_transpose: bool


@dataclass(frozen=True, slots=True)
class _ScopedChange:
    """A change of a model's part, whose names begin with one of ``scopes``."""

    change: _Change
    scopes: tuple[str, ...]

    def match(self, name: str) -> tuple[int, re.Match[str], str] | None:
        """Return the number of the pattern that matches, the match, and the scope, or None."""
        scope = next((s for s in self.scopes if name.startswith(s)), None)
        if scope is None:
            return None
        for number, pattern in enumerate(self.change.patterns):
            if match := pattern.search(name[len(scope) :]):
                return number, match, scope
        return None


def places(names: Iterable[str], config: Mapping[str, Any]) -> dict[str, tuple[Place, ...]]:
    """Return the places in memory of each name in a file.

    A name that no change matches keeps its name. ``config``: the ``config.json`` beside the files.
    """
    changes = tuple(_changes(config))
    renamings = [c for c in changes if not c.change.is_conversion]
    conversions = [c for c in changes if c.change.is_conversion]
    return {name: _places(name, renamings, conversions) for name in names}


def _places(
    name: str, renamings: Iterable[_ScopedChange], conversions: Iterable[_ScopedChange]
) -> tuple[Place, ...]:
    """Return the places of a file's tensor: several if it becomes several tensors in memory.

    All renamings apply in order, each once, then the first conversion that matches. Without one it
    is the whole tensor under the new name.
    """
    for scoped in renamings:
        if fit := scoped.match(name):
            _, match, scope = fit
            name = scope + _replaced(match, scoped.change.names[0])
    for scoped in conversions:
        if fit := scoped.match(name):
            piece, match, scope = fit
            number = match.groupdict().get("expert")
            return tuple(
                Place(
                    scope + _replaced(match, live),
                    None if number is None else int(number),
                    piece,
                    len(scoped.change.patterns),
                    part,
                    len(scoped.change.names),
                    scoped.change.may_transpose,
                )
                for part, live in enumerate(scoped.change.names)
            )
    return (Place(name),)


def _replaced(match: re.Match[str], text: str) -> str:
    r"""Return ``match.string`` with the match replaced by ``text``, where ``\1`` is its group 1."""
    name = match.string
    replacement = match.expand(text) if "\\" in text else text  # expand parses the text each time
    return f"{name[: match.start()]}{replacement}{name[match.end() :]}"


def _changes(config: Mapping[str, Any]) -> Iterator[_ScopedChange]:
    """Yield the changes that a configuration implies: by family, then those of all models."""
    for family, scopes in _families(config):
        for change in _table().get(family, ()):
            yield _ScopedChange(change, scopes)
    for change in _table()[_EVERY]:
        yield _ScopedChange(change, _ROOT)


def _families(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the families of a model and of its parts, each with the prefixes of its names.

    A class in ``architectures``, if it is the only one and in the table, stands for the
    ``model_type``. Parts are sections of `_SCOPES` with another type, at any depth; `_MOST_CONFIGS`
    sections are read. A family need not be in the table.
    """
    classes = config.get("architectures")
    name = classes[0] if isinstance(classes, list) and len(classes) == 1 else None
    kind = config.get("model_type")
    if isinstance(name, str) and name in _table():
        yield name, _ROOT
    elif isinstance(kind, str):
        yield kind, _ROOT
    sections = [config]  # grows while it is walked
    for section in sections:
        for key, inner in section.items():
            if (
                key.endswith("_config")
                and isinstance(inner, dict)
                and len(sections) < _MOST_CONFIGS
            ):
                sections.append(inner)
                nested = inner.get("model_type")
                if isinstance(nested, str) and nested != kind and key in _SCOPES:
                    yield nested, _SCOPES[key]


@lru_cache(maxsize=1)
def _table() -> Mapping[str, tuple[_Change, ...]]:
    """Parse `FAMILIES` at the first call, and return the changes of each family, in order."""
    table: dict[str, tuple[_Change, ...]] = {}
    for paragraph in FAMILIES.strip().split("\n\n"):
        families: list[str] = []
        changes: list[_Change] = []
        for line in paragraph.splitlines():
            if line.startswith("# "):
                families += line.split()[1:]
            elif line.startswith("as "):
                changes += table[line.removeprefix("as ")]
            else:
                changes.append(_parsed(line))
        table |= dict.fromkeys(families, tuple(changes))
    return table


def _parsed(line: str) -> _Change:
    """Return a line of the table: ``FILE => MEMORY``, with ``^T`` if axes may be swapped."""
    file, _, live = line.partition(" => ")
    live, mark, _ = live.partition(" ^T")
    texts, names = _alternatives(file), _alternatives(live)
    patterns = tuple(re.compile(t.replace(".*.", r"\.(?P<expert>[0-9]{1,6})\.")) for t in texts)
    is_conversion = bool(mark) or ".*." in file or len(texts) > 1 or len(names) > 1
    return _Change(patterns, names, is_conversion, bool(mark))


def _alternatives(text: str) -> tuple[str, ...]:
    """Return ``q_proj`` and ``k_proj`` for ``{q,k}_proj``; the text itself without braces."""
    before, mark, after_brace = text.partition("{")
    inner, _, after = after_brace.partition("}")
    return tuple(f"{before}{word}{after}" for word in inner.split(",")) if mark else (text,)
