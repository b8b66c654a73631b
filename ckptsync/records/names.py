"""Where things lie in a store, and which names are safe to use there.

<run>/checkpoint-500/…                                  the trainer's own files
<run>/consolidated/checkpoint-500/…                     the consolidated model
<run>/.ckptsync/checkpoint-500/manifest-<node>-<n>-<digest>.json, model-<n>-…, report-<n>-…, tombstone-<n>-…, keep-<n>-…, join-<n>-…
<run>/.ckptsync/checkpoint-500/agreement-<n>.json      what heads have agreed to make of it
<run>/.ckptsync/checkpoint-500/files/<node>/<path>      a node's file whose plain name had other bytes
<run>/.ckptsync/checkpoint-500/sending/<node>           not empty while that node sends files of that checkpoint's name
.ckptsync/store.json, .ckptsync/nodes/<node>.json, .ckptsync/clocks/<node>
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from ckptsync.errors import Corrupt

OURS = ".ckptsync"
CONSOLIDATED = "consolidated"
STORE_FILE = f"{OURS}/store.json"
RecordKind = Literal["manifest", "model", "report", "tombstone", "keep", "join"]
_SINGLE: tuple[RecordKind, ...] = ("model", "report", "tombstone", "keep", "join")

NUMBER = "0|[1-9][0-9]{0,17}"
"""The number in a name of ours, of which there is one spelling: else a copy under another spelling would count twice."""
_RECORD = re.compile(
    rf"(manifest)-([A-Za-z0-9_.-]+)-({NUMBER})-([0-9a-f]{{16}})\.json|({'|'.join(_SINGLE)})-({NUMBER})-([0-9a-f]{{16}})\.json"
)
_NODE = re.compile(r"[A-Za-z0-9_.-]{1,100}")


def checked_node(node: str) -> str:
    """``node`` itself if it can be part of a record's name; raises Corrupt."""
    if not _NODE.fullmatch(node) or node in (".", ".."):
        raise Corrupt(f"{node!r}: not a node id (letters, digits, '_', '.', '-', at most 100)")
    return node


@dataclass(frozen=True, slots=True)
class RecordName:
    """A record's name, taken apart.  ``node`` is empty but for manifests; ``digest`` is the first 16 hex digits."""

    run: str
    location: str
    kind: RecordKind
    node: str
    n: int
    digest: str

    def __str__(self) -> str:
        node = f"{self.node}-" if self.kind == "manifest" else ""
        return f"{records_prefix(self.run, self.location)}{self.kind}-{node}{self.n}-{self.digest}.json"


def records_prefix(run: str, location: str) -> str:
    """Where the records about one location stand; ends in a slash."""
    return f"{run}/{OURS}/{location}/"


def parse_record_name(name: str) -> RecordName | None:
    """The parts of a record's name, or ``None`` for any other name.  ``str(parse_record_name(s)) == s``."""
    head, _, base = name.rpartition("/")
    run, _, location = head.partition(f"/{OURS}/")
    found = _RECORD.fullmatch(base)
    if not found or not run or not location or "/" in location:
        return None
    if found[1]:
        return RecordName(run, location, "manifest", found[2], int(found[3]), found[4])
    kind = next(kind for kind in _SINGLE if kind == found[5])
    return RecordName(run, location, kind, "", int(found[6]), found[7])


def file_name(run: str, location: str, path: str) -> str:
    """Where a checkpoint's file lies under its plain name."""
    return f"{run}/{location}/{path}"


def node_file_name(run: str, location: str, node: str, path: str) -> str:
    """Return where a node stores a file whose plain name has other bytes."""
    return f"{records_prefix(run, location)}files/{node}/{path}"


def consolidated_prefix(run: str, location: str) -> str:
    """Where the consolidated model of a location lies; ends in a slash."""
    return f"{run}/{CONSOLIDATED}/{location}/"


def sending_prefix(run: str, checkpoint: str) -> str:
    """Where nodes say that they are sending files of a checkpoint, each under its id; ends in a slash."""
    return f"{records_prefix(run, checkpoint)}sending/"


def clock_name(node: str) -> str:
    """What a node writes over and over to learn the time of the store's clock."""
    return f"{OURS}/clocks/{node}"


def node_facts_name(node: str) -> str:
    """A node's heartbeat, which is overwritten."""
    return f"{OURS}/nodes/{node}.json"
