"""What alarms are judged by, and how they speak.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptsync.catalogue.summary import Catalogue
from ckptsync.fleet.alarms import Patience, Room
from ckptsync.fleet.nodes import Node
from ckptsync.fleet.runs import Run
from ckptsync.units import show_size


@dataclass(frozen=True, slots=True)
class Scene:
    """All that is known of a store; ``now`` on its clock."""

    catalogue: Catalogue
    nodes: Sequence[Node]
    runs: Sequence[Run]
    room: Room | None
    now: float
    patience: Patience

    @property
    def alive(self) -> tuple[Node, ...]:
        """The nodes that live."""
        return tuple(n for n in self.nodes if n.state == "alive")


def first(lines: Sequence[str]) -> str:
    """The first line, and how many more there are."""
    more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
    return f"{lines[0]}{more}" if lines else "no reason is known"


def those(nodes: Sequence[str]) -> str:
    """Some nodes by name."""
    return f"{', '.join(nodes[:3])}{' and others' if len(nodes) > 3 else ''}" or "its node"


def free_of(free: int, total: int) -> str:
    """Bytes that are free, as people read them."""
    return f"{show_size(free)} of {show_size(total)} are free"
