"""Names inside a root: ``join("global_step4", "latest")``; the root ``""`` is the checkpoint itself."""

from __future__ import annotations

from collections.abc import Iterable


def join(root: str, name: str) -> str:
    """``root/name``, or ``name`` alone at the top."""
    return f"{root}/{name}" if root else name


def inside(names: Iterable[str], root: str) -> dict[str, str]:
    """Names directly in ``root``, by their last component."""
    return {name.rpartition("/")[2]: name for name in names if name.rpartition("/")[0] == root}
