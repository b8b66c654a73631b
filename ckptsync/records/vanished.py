"""Manifests that other records name, and that are not there any more.

No record is taken away while its save is kept (docs/store-format.md, Records), so somebody, or a file system, lost what a model record or a report speaks of.  Without
this a location of which every manifest is gone would be no location at all, and nobody would miss it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from ckptsync.errors import Corrupt, NotFound
from ckptsync.records.coding import Record
from ckptsync.records.manifest import Manifest
from ckptsync.records.model_record import ModelRecord
from ckptsync.records.names import RecordName, parse_record_name
from ckptsync.records.report import Report
from ckptsync.records.tombstone import Tombstone, in_force


class Vanished(Corrupt):
    """A record that others name is not there."""


def vanished(records: Mapping[str, Record], listed: Collection[str], size: Callable[[str], int]) -> dict[str, Vanished]:
    """Names of manifests that are gone, each with who names it.

    ``records``: all that can be read of some checkpoints, in all their locations; ``listed``: the names of all, also of those that cannot be read.
    ``size`` gives a stored name's bytes, or raises NotFound: a listing is no instant, and who is missing is asked for by name.
    """
    wanted = {name: by for name, by in _witnesses(records) if name not in listed}
    if not wanted:
        return {}
    excused = _excused(records)
    found = {}
    for name, by in sorted(wanted.items()):
        parsed = parse_record_name(name)
        if parsed is not None and parsed.kind == "manifest" and not excused(name, parsed) and _is_gone(name, size):
            hint = "its node writes it again if it still has the files; if it was removed on purpose, remove what names it, too"
            found[name] = Vanished(f"{name}: is gone, and {by.rpartition('/')[2]} names it", hint=hint)
    return found


def _witnesses(records: Mapping[str, Record]) -> Iterator[tuple[str, str]]:
    """A manifest's name, and a record of the same location that names it."""
    for by, record in sorted(records.items(), reverse=True):
        if isinstance(record, ModelRecord | Report):
            here = f"{by.rpartition('/')[0]}/manifest-"
            yield from ((name, by) for name in record.manifests if name.startswith(here))


def _excused(records: Mapping[str, Record]) -> Callable[[str, RecordName], bool]:
    """Its own node has written another in its stead; or its save was let go, or the one that its node moved it to (that took it along).

    Only records of its own checkpoint excuse it: what is said of a checkpoint must not change with how many others are read beside it.
    """
    manifests = [r for r in records.values() if isinstance(r, Manifest)]
    replaced = {(m.run, m.checkpoint, m.node, name) for m in manifests for name in m.supersedes}
    locations: dict[tuple[str, str], dict[str, Tombstone]] = {}
    for name, record in records.items():
        if isinstance(record, Tombstone):
            locations.setdefault((record.run, record.location), {})[name] = record
    ended = [t for stones in locations.values() for t in in_force(stones).values() if t.scope == "location"]
    named = {(t.run, t.checkpoint, name) for t in ended for name in t.manifests}
    nodes = {(t.run, t.checkpoint, node) for t in ended for node in t.ended}

    def is_excused(name: str, parsed: RecordName) -> bool:
        here = (parsed.run, parsed.location.partition("~")[0])
        return (*here, name) in named or (*here, parsed.node, name) in replaced or (*here, parsed.node) in nodes

    return is_excused


def _is_gone(name: str, size: Callable[[str], int]) -> bool:
    try:
        size(name)
    except NotFound:
        return True
    return False
