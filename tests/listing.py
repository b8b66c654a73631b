"""The listing in docs/store-format.md, made by the code itself: `python -m tests.listing` writes it there anew."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from ckptsync.catalogue.fresh import fresh
from ckptsync.head.consolidate import HeadOptions
from ckptsync.records.saves import choose_location
from ckptsync.records.state import Snapshot
from ckptsync.stores.memory import MemoryStore
from ckptsync.verify.location import verify_location
from ckptsync.verify.reporting import write_report
from tests.filled import DEMO, FIRST, SECOND, flip, manifest_of, read, send, two_nodes
from tests.heads import consolidate_due

DOCUMENT = Path(__file__).parent.parent / "docs" / "store-format.md"
BASE = HeadOptions(config_from={"*": str(DEMO / "base")})
SHARD = "run/checkpoint-4/pytorch_model_fsdp_0/__1_0.distcp"
SHOWN = 19  # keys of a mapping that people need to see


def store() -> MemoryStore:
    """Two nodes' save, consolidated, found damaged, repaired and verified; then one of them writes the same step again, an hour later."""
    made = MemoryStore()
    two_nodes(made)
    consolidate_due(made, BASE)
    snapshot = _verified(made)
    for _ in "there", "and back":
        flip(made, SHARD, 40_000)
        snapshot = _verified(made)
    again = DEMO / "zero3/node1/checkpoint-4"
    late = FIRST + 3600 * SECOND
    send(made, again, "node1", choose_location(manifest_of(again, "node1", at=late), snapshot.manifests), at=late)
    return made


def _verified(made: MemoryStore) -> Snapshot:
    snapshot = fresh(made).locations[0]
    write_report(made, verify_location(made, snapshot, "digest"))
    return snapshot


def listing(made: MemoryStore) -> str:
    return "\n".join(f"{entry.size:>7} {entry.name}" for entry in made.names(""))


def examples(made: MemoryStore) -> Iterator[tuple[str, str]]:
    """One record of each kind, shortened."""
    for kind in ("manifest-node0", "model-0", "report-2"):
        name = next(e.name for e in made.names("run/.ckptsync/checkpoint-4/") if f"/{kind}-" in e.name)
        yield name, json.dumps(_short(json.loads(read(made, name))), indent=1, ensure_ascii=False)


def _short(value: object) -> object:
    if isinstance(value, list):
        return [_short(v) for v in value[:1]] + (["…"] if len(value) > 1 else [])
    if isinstance(value, dict):
        shown = list(value.items())[:SHOWN]
        return {k: _short(v) for k, v in shown} | ({"…": "…"} if len(value) > len(shown) else {})
    return value


def block(made: MemoryStore) -> str:
    parts = [f"```\n{listing(made)}\n```"]
    parts += [f"`{name}`, lists cut after their first item:\n\n```json\n{text}\n```" for name, text in examples(made)]
    return "\n\n".join(parts)


def document(text: str) -> str:
    """``text`` with a fresh listing between its two marks."""
    before, _, rest = text.partition("<!-- listing -->\n")
    _, _, after = rest.partition("<!-- end of listing -->")
    return f"{before}<!-- listing -->\n{block(store())}\n<!-- end of listing -->{after}"


if __name__ == "__main__":
    DOCUMENT.write_text(document(DOCUMENT.read_text()))
