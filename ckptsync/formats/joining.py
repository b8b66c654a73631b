"""Names inside a root: ``join("global_step4", "latest")``; the root ``""`` is the checkpoint itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ckptsync.errors import Incomplete
from ckptsync.model import Files


def join(root: str, name: str) -> str:
    """``root/name``, or ``name`` alone at the top."""
    return f"{root}/{name}" if root else name


def inside(names: Iterable[str], root: str) -> dict[str, str]:
    """Names directly in ``root``, by their last component."""
    return {name.rpartition("/")[2]: name for name in names if name.rpartition("/")[0] == root}


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
