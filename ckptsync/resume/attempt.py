"""Which attempt of a training this is, and how many nodes take part in it.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of a training on all of its nodes.

    ``name`` is the same on all nodes of one start, and another for each start; ``node`` is the id
    of this node, as the worker's.
    """

    name: str
    nnodes: int
    node: str


def read_attempt(
    environment: Mapping[str, str],
    node: str,
    fresh: str,
    *,
    name: str | None = None,
    nnodes: int | None = None,
) -> Attempt:
    """Return the attempt that the options and the launcher's variables say.

    ``fresh``: a name that nobody else uses, for a training on one node.

    Raises ConfigError where several nodes are expected and no variable names the attempt.
    """
    raise NotImplementedError


def next_try(attempt: Attempt, number: int) -> Attempt:
    """Return the attempt of a restart: ``number`` 1 for the first one after the attempt itself."""
    raise NotImplementedError
