"""Names in a store: where files lie, and which names are safe to use there.

Names come from records, and so from whoever can write to the store. So every name that is read,
written or deleted is made, taken apart and checked by these functions alone. Pure.

    <run>/checkpoint-500/…               the trainer's own files
    <run>/consolidated/checkpoint-500/…  the consolidated model
    <run>/logs/<node>/…                  what a training on that node logs, replaced as it grows
    .ckptsync/store.json, .ckptsync/nodes/<node>.json, .ckptsync/clocks/<node>
    .ckptsync/resume/<run>/<attempt>/…   how nodes agree on what a training begins with

In <run>/.ckptsync/checkpoint-500/:

    manifest-<node>-<n>-<digest>.json
    model-<n>-…, weights-<n>-…, report-<n>-…, tombstone-<n>-…, keep-<n>-…, join-<n>-…, event-<n>-…
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
from ckptsync.safe_names import CONSOLIDATED, LOGS, RECORDS, checked_path, checked_run_name, is_ours
from ckptsync.stores.contract import Entry

FORMAT = 1
"""The newest format of records that this program knows."""
RecordKind = Literal["manifest", "model", "weights", "report", "tombstone", "keep", "join", "event"]
_SINGLE: tuple[RecordKind, ...] = (
    "model",
    "weights",
    "report",
    "tombstone",
    "keep",
    "join",
    "event",
)

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
    """Return ``node``; raise Corrupt if it cannot be part of a record's name."""
    if not _NODE.fullmatch(node) or node in (".", ".."):
        raise Corrupt(f"{node!r}: not a node id (letters, digits, '_', '.', '-', at most 100)")
    return node


@dataclass(frozen=True, slots=True)
class RecordName:
    """The parts of a record's name.

    ``node`` is empty for all kinds but manifests; ``digest`` is 16 hex digits of the record's.
    """

    run: str
    location: str
    kind: RecordKind
    node: str
    n: int
    digest: str

    def __str__(self) -> str:
        """Return the record's name in the store."""
        node = f"{self.node}-" if self.kind == "manifest" else ""
        prefix = records_prefix(self.run, self.location)
        return f"{prefix}{self.kind}-{node}{self.n}-{self.digest}.json"


@lru_cache(1024)
def own_prefixes(run: str, location: str) -> tuple[str, str, str]:
    """Return where a location's own files, its records, and its consolidated model lie.

    Each prefix ends in a slash. Raise Corrupt for a run or location whose name a store itself uses,
    or that leads elsewhere, so that nothing of one location lies in another, or among the records.
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
    """Return ``name``; raise Corrupt if it lies below none of ``prefixes``, or among records.

    Called before each write or deletion of a file of a location; ``prefixes``: see `own_prefixes`.
    """
    prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
    path = name[len(prefix) :]
    if not prefix or has_records(checked_path(path)):
        raise Corrupt(f"{name}: lies outside of its location", hint=_NOT_OURS)
    return name


def has_records(path: str) -> bool:
    """Return whether a component of a path is the directory of records, in any case of letters."""
    return RECORDS in path.casefold() and RECORDS in path.casefold().split("/")


def records_prefix(run: str, location: str) -> str:
    """Return where the records about one location lie; ends in a slash."""
    return f"{run}/{RECORDS}/{location}/"


def parse_record_name(name: str) -> RecordName | None:
    """Return the parts of a record's name in a store, or None for any other name.

    Agreements and announcements are none. ``str(parse_record_name(s)) == s``.
    """
    head, _, base = name.rpartition("/")
    run, _, location = head.partition(f"/{RECORDS}/")
    match = _RECORD.fullmatch(base)
    if not match or not run or not location or "/" in location:
        return None
    if match[1]:
        return RecordName(run, location, "manifest", match[2], int(match[3]), match[4])
    kind = next(kind for kind in _SINGLE if kind == match[5])
    return RecordName(run, location, kind, "", int(match[6]), match[7])


def file_name(run: str, location: str, path: str) -> str:
    """Return where a checkpoint's file lies under its plain name."""
    return f"{run}/{location}/{path}"


def node_file_name(run: str, location: str, node: str, path: str) -> str:
    """Return where a node stores a file if another node's bytes have the plain name."""
    return f"{records_prefix(run, location)}files/{node}/{path}"


def consolidated_prefix(run: str, location: str) -> str:
    """Return where the consolidated model of a location lies; ends in a slash."""
    return f"{run}/{CONSOLIDATED}/{location}/"


def logs_prefix(run: str, node: str = "") -> str:
    """Return where the logs of a run lie, or those of one node; ends in a slash."""
    return f"{run}/{LOGS}/{node}/" if node else f"{run}/{LOGS}/"


def sending_prefix(run: str, checkpoint: str) -> str:
    """Return where nodes announce uploads of a checkpoint, each under its id; ends in a slash."""
    return f"{records_prefix(run, checkpoint)}sending/"


def checkpoint_of(location: str) -> str:
    """Return the trainer's name of the checkpoint in a location: all before the first ``~``."""
    return location.partition("~")[0]


SENDING = 900.0
"""Seconds on the store's clock after which a node that no longer says that it sends files has
stopped: it says so every minute.
"""


def senders(entries: Iterable[Entry], now: float) -> dict[tuple[str, str], dict[str, float]]:
    """Return which nodes are sending: (run, checkpoint) → node → when it last announced it.

    ``entries``: a listing with the files below `sending_prefix`. Announcements that are empty, or
    older than `SENDING` at ``now``, do not count. Times are seconds on the store's clock.
    """
    nodes_by_checkpoint: dict[tuple[str, str], dict[str, float]] = {}
    for entry in entries:
        if not entry.size or "/sending/" not in entry.name:
            continue
        prefix, _, node = entry.name.rpartition("/sending/")
        run, _, checkpoint = prefix.partition(f"/{RECORDS}/")
        if checkpoint and "/" not in node + checkpoint and now - entry.mtime < SENDING:
            nodes_by_checkpoint.setdefault((run, checkpoint), {})[node] = entry.mtime
    return nodes_by_checkpoint


def clock_name(node: str) -> str:
    """Return the file that a node overwrites to learn the time of the store's clock."""
    return f"{RECORDS}/clocks/{node}"


def node_facts_name(node: str) -> str:
    """Return where a node's heartbeat lies, which is overwritten."""
    return f"{RECORDS}/nodes/{node}.json"


def resume_prefix(run: str, attempt: str = "") -> str:
    """Return where the nodes of one attempt agree on what a training begins with; ends in a slash.

    Without ``attempt``: where all attempts of a run lie. Raise Corrupt for names that lead
    elsewhere.
    """
    above = f"{RECORDS}/resume/{checked_run_name(run)}/"
    return f"{above}{checked_node(attempt)}/" if attempt else above
