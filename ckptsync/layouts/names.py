"""Names of a checkpoint's files by the directory that they lie in.

A root is a directory of the checkpoint; the root ``""`` is the checkpoint itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from ckptsync.errors import Incomplete
from ckptsync.model import Files

HOMES = ("", "checkpoint", "model", "hf_model")
"""Where a whole model may lie in a checkpoint: Ray Train reports Trainer's in ``checkpoint`` (``RayTrainReportCallback``); LLaMA-Factory v1 has its own two."""


def join(root: str, name: str) -> str:
    """Return ``root/name``, or ``name`` alone at the top."""
    return f"{root}/{name}" if root else name


def inside(names: Iterable[str], root: str) -> dict[str, str]:
    """Return the names directly in ``root``, by their last component."""
    return {name.rpartition("/")[2]: name for name in names if name.rpartition("/")[0] == root}


def home(names: Iterable[str], holds: Callable[[Collection[str]], object]) -> tuple[str, ...]:
    """Return the directory whose own files ``holds`` accepts as a model: the top, else the first of `HOMES`; or nothing."""
    found: dict[str, set[str]] = {name: set() for name in HOMES}
    for name in names:
        above, _, last = name.rpartition("/")
        if above in found:
            found[above].add(last)
    return next(((name,) for name, own in found.items() if holds(own)), ())


class Within:
    """The files directly in one directory of others, under their last components."""

    def __init__(self, files: Files, directory: str) -> None:
        self._files, self._names = files, inside(files.sizes(), directory)

    def sizes(self) -> Mapping[str, int]:
        """As `Files` says."""
        sizes = self._files.sizes()
        return {name: sizes[stored] for name, stored in self._names.items()}

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """As `Files` says."""
        if name not in self._names:
            raise Incomplete(f"{name}: not there")
        self._files.read_into(self._names[name], start, out)
