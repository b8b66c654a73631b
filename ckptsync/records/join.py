"""A record of a person's word that manifests which nothing proves to be one save are one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ckptsync.decoding import Count, FormatNumber
from ckptsync.records.manifest import Manifest
from ckptsync.records.names import parse_record_name

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Join:
    """``manifests``: names of those that are parts of one save, in whatever locations of the checkpoint's name."""

    run: str
    checkpoint: str
    location: str
    n: Count
    manifests: tuple[str, ...]
    format: FormatNumber = FORMAT


def joins_of(manifests: Mapping[str, Manifest], joins: Mapping[str, Join]) -> dict[str, frozenset[str]]:
    """Return the names of the joins that hold for each manifest: those that name it, or one that its node has moved from.

    ``manifests``: all of a checkpoint's name, also those taken back.
    """
    members = {name: _with_successors(join.manifests, manifests) for name, join in joins.items()}
    return {m: frozenset(name for name, its in members.items() if m in its) for m in manifests}


def _with_successors(names: Iterable[str], manifests: Mapping[str, Manifest]) -> Mapping[str, str]:
    """Return these manifests, and those by which their own nodes have replaced them: name → node."""
    members = {name: parsed.node for name in names if (parsed := parse_record_name(name))}
    while fresh := {
        name: m.node
        for name, m in manifests.items()
        if name not in members and any(members.get(old) == m.node for old in m.supersedes)
    }:
        members |= fresh
    return members
