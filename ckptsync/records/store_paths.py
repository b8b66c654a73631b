"""Names in a store: where things lie, and which names are safe to use there.

    <run>/checkpoint-500/…               the trainer's own files
    <run>/consolidated/checkpoint-500/…  the consolidated model
    .ckptsync/store.json, .ckptsync/nodes/<node>.json, .ckptsync/clocks/<node>
    .ckptsync/resume/<run>/<attempt>/…   how nodes agree on what a training begins with

In <run>/.ckptsync/checkpoint-500/:

    manifest-<node>-<n>-<digest>.json
    model-<n>-…, report-<n>-…, tombstone-<n>-…, keep-<n>-…, join-<n>-…
    agreement-<n>.json   of what a head makes its model, before it begins
    files/<node>/<path>  a node's file whose plain name had other bytes
    sending/<node>       not empty while that node sends files of that checkpoint's name
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from ckptsync.errors import Corrupt
from ckptsync.safe_names import CONSOLIDATED, RECORDS, checked_path, checked_run_name, is_ours
from ckptsync.stores.contract import Entry

FORMAT = 1
"""The newest format of records that this program knows."""
RecordKind = Literal["manifest", "model", "report", "tombstone", "keep", "join"]
_SINGLE: tuple[RecordKind, ...] = ("model", "report", "tombstone", "keep", "join")

NUMBER = "0|[1-9][0-9]{0,17}"
"""The number in a name of ours, of which there is one spelling: else a copy under another spelling
would count twice.
"""
_RECORD = re.compile(
    rf"(manifest)-([A-Za-z0-9_.-]+)-({NUMBER})-([0-9a-f]{{16}})\.json|({'|'.join(_SINGLE)})-({NUMBER})-([0-9a-f]{{16}})\.json"
)
_NOT_OURS = "no ckptsync writes that: find out who can write to the store"
_NODE = re.compile(r"[A-Za-z0-9_.-]{1,100}")


def checked_node(node: str) -> str:
    """Return ``node`` if it can be part of a record's name; raise Corrupt otherwise."""
    if not _NODE.fullmatch(node) or node in (".", ".."):
        raise Corrupt(f"{node!r}: not a node id (letters, digits, '_', '.', '-', at most 100)")
    return node


@dataclass(frozen=True, slots=True)
class RecordName:
    """A record's name, taken apart.

    ``node`` is empty but for manifests; ``digest`` is the first 16 hex digits.
    """

    run: str
    location: str
    kind: RecordKind
    node: str
    n: int
    digest: str

    def __str__(self) -> str:
        node = f"{self.node}-" if self.kind == "manifest" else ""
        prefix = records_prefix(self.run, self.location)
        return f"{prefix}{self.kind}-{node}{self.n}-{self.digest}.json"


@lru_cache(1024)
def own_prefixes(run: str, location: str) -> tuple[str, str, str]:
    """Return where the files of a location lie: its own, its records, its consolidated model.

    Each ends in a slash.  Raises Corrupt for names of runs and locations that a store itself uses,
    or that lead elsewhere: so nothing of one location lies in another, or among the records.
    """
    try:
        checked_run_name(run)
        checked_path(location)
    except Corrupt as e:
        raise Corrupt(str(e), hint=_NOT_OURS) from e
    if "/" in location or is_ours(location):
        raise Corrupt(f"{run}/{location}: has a name that the store itself uses", hint=_NOT_OURS)
    return f"{run}/{location}/", records_prefix(run, location), consolidated_prefix(run, location)


def checked_own(name: str, prefixes: Iterable[str]) -> str:
    """Return ``name`` if it lies below one of `own_prefixes`; raise Corrupt if not.

    Whoever writes or deletes a file of a location, or a record about it, asks here first: names
    come from records, and so from whoever can write to the store.
    """
    prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
    path = name[len(prefix) :]
    if not prefix or has_records(checked_path(path)):
        raise Corrupt(f"{name}: lies outside of its location", hint=_NOT_OURS)
    return name


def has_records(path: str) -> bool:
    """Return whether files at a path would lie among the records of a run."""
    return RECORDS in path.casefold() and RECORDS in path.casefold().split("/")


def records_prefix(run: str, location: str) -> str:
    """Return where the records about one location lie; ends in a slash."""
    return f"{run}/{RECORDS}/{location}/"


def parse_record_name(name: str) -> RecordName | None:
    """Return the parts of a record's name, or ``None`` for any other name.

    ``str(parse_record_name(s)) == s``.
    """
    head, _, base = name.rpartition("/")
    run, _, location = head.partition(f"/{RECORDS}/")
    found = _RECORD.fullmatch(base)
    if not found or not run or not location or "/" in location:
        return None
    if found[1]:
        return RecordName(run, location, "manifest", found[2], int(found[3]), found[4])
    kind = next(kind for kind in _SINGLE if kind == found[5])
    return RecordName(run, location, kind, "", int(found[6]), found[7])


def file_name(run: str, location: str, path: str) -> str:
    """Return where a checkpoint's file lies under its plain name."""
    return f"{run}/{location}/{path}"


def node_file_name(run: str, location: str, node: str, path: str) -> str:
    """Return where a node stores a file whose plain name has other bytes."""
    return f"{records_prefix(run, location)}files/{node}/{path}"


def consolidated_prefix(run: str, location: str) -> str:
    """Return where the consolidated model of a location lies; ends in a slash."""
    return f"{run}/{CONSOLIDATED}/{location}/"


def sending_prefix(run: str, checkpoint: str) -> str:
    """Return where nodes announce uploads of a checkpoint, each under its id; ends in a slash."""
    return f"{records_prefix(run, checkpoint)}sending/"


def checkpoint_of(location: str) -> str:
    """Return the trainer's name of the checkpoint in a location.

    It is ``checkpoint-5`` for ``checkpoint-5~1a2b3c4d``.
    """
    return location.partition("~")[0]


SENDING = 900.0
"""Seconds on the store's clock after which a node that no longer says that it sends files has
stopped: it says so every minute.
"""


def senders(entries: Iterable[Entry], now: float) -> dict[tuple[str, str], dict[str, float]]:
    """Return who is sending files: (run, checkpoint) → node → when it last said so.

    ``entries``: a listing with the files below `sending_prefix`. ``now``, and the times: seconds on
    the store's clock.
    """
    found: dict[tuple[str, str], dict[str, float]] = {}
    for entry in entries:
        if not entry.size or "/sending/" not in entry.name:
            continue
        place, _, node = entry.name.rpartition("/sending/")
        run, _, checkpoint = place.partition(f"/{RECORDS}/")
        if checkpoint and "/" not in node + checkpoint and now - entry.mtime < SENDING:
            found.setdefault((run, checkpoint), {})[node] = entry.mtime
    return found


def clock_name(node: str) -> str:
    """Return the file that a node overwrites to learn the time of the store's clock."""
    return f"{RECORDS}/clocks/{node}"


def node_facts_name(node: str) -> str:
    """Return where a node's heartbeat lies, which is overwritten."""
    return f"{RECORDS}/nodes/{node}.json"


def resume_prefix(run: str, attempt: str = "") -> str:
    """Return where the nodes of an attempt agree on what a training begins with; ends in a slash.

    Without ``attempt``: where all attempts of a run lie.  Raises Corrupt for names that lead
    elsewhere.
    """
    above = f"{RECORDS}/resume/{checked_run_name(run)}/"
    return f"{above}{checked_node(attempt)}/" if attempt else above
