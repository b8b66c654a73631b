"""Read the files of several models as one `Files`: each model's but the first's under a prefix.

A merge that fills tensors from another model, or sums adapters into a base, reads several models at
once, whose files have the same names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from ckptsync.tensors import Copy, Extent, Files, Part, expect, foresee

FILL = "--fill-from:"
"""The prefix of the model that ``--fill-from`` names."""
_Item = TypeVar("_Item")


class JoinedFiles:
    """The files of a model, and those of ``others``, each under its prefix.

    No prefix begins another one, nor a name of ``files``.
    """

    def __init__(self, files: Files, prefixed_models: Mapping[str, Files]) -> None:
        self._models = {**prefixed_models, "": files}
        self._sizes = {
            prefix + name: size
            for prefix, model in self._models.items()
            for name, size in model.sizes().items()
        }

    def sizes(self) -> Mapping[str, int]:
        """See `Files`."""
        return self._sizes

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """See `Files`."""
        prefix = self._prefix(name)
        self._models[prefix].read_into(name.removeprefix(prefix), start, out)

    def expect(self, extents: Iterable[Extent]) -> None:
        """See `Expecting`."""
        for prefix, group in self._group_by_prefix((e.file, e) for e in extents).items():
            expect(self._models[prefix], (_strip_prefix(prefix, e) for e in group))

    def foresee(self, reads: Iterable[tuple[Extent, int]]) -> None:
        """See `Expecting`."""
        for prefix, group in self._group_by_prefix(
            (e.file, (e, position)) for e, position in reads
        ).items():
            foresee(
                self._models[prefix],
                ((_strip_prefix(prefix, e), position) for e, position in group),
            )

    def _prefix(self, name: str) -> str:
        """Return the prefix of a name; "", that of ``files``, if no other prefix begins it."""
        return next(prefix for prefix in self._models if name.startswith(prefix))

    def _group_by_prefix(self, items: Iterable[tuple[str, _Item]]) -> dict[str, list[_Item]]:
        """Return items by the prefix of the file that each is of."""
        groups: dict[str, list[_Item]] = {}
        for name, item in items:
            groups.setdefault(self._prefix(name), []).append(item)
        return groups


def add_prefix(copy: Copy, prefix: str) -> Copy:
    """Return a stored copy whose files are named with a prefix, as `JoinedFiles` names them."""

    def extent(unprefixed: Extent) -> Extent:
        """Return an extent whose file has the prefix."""
        return replace(unprefixed, file=prefix + unprefixed.file)

    def renamed(part: Part) -> Part:
        """Return a part, its checksum and its replicas with the prefix before their files."""
        checksum = part.checksum
        return replace(
            part,
            extent=extent(part.extent),
            checksum=replace(checksum, extent=extent(checksum.extent)) if checksum else None,
            replicas=tuple(map(renamed, part.replicas)),
        )

    return replace(copy, parts=tuple(map(renamed, copy.parts)))


def _strip_prefix(prefix: str, extent: Extent) -> Extent:
    """Return an extent whose file name has no ``prefix``."""
    return replace(extent, file=extent.file.removeprefix(prefix))
