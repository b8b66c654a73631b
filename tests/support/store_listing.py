"""The listing in docs/store-format.md, made by the code itself.

`python -m tests.support.store_listing` writes it into the document.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from ckptsync.catalogue.uncached import read_state
from ckptsync.head.consolidate import HeadOptions
from ckptsync.records.location_status import LocationState
from ckptsync.records.manifest_groups import choose_location
from ckptsync.records.save_decisions import Join, Keep, Tombstone
from ckptsync.stores.contract import read_all
from ckptsync.stores.memory import MemoryStore
from ckptsync.verifier.verification import VerifyOptions, verify_location
from ckptsync.verifier.write_reports import write_report
from tests.support.filled_stores import DEMO, FIRST, SECOND, flip, manifest_of, put, send, two_nodes
from tests.support.head_in_process import consolidate_due

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "store-format.md"
BASE = HeadOptions(config_from={"*": str(DEMO / "base")})
SHARD = "run/checkpoint-4/pytorch_model_fsdp_0/__1_0.distcp"
COMMON = {"run", "checkpoint", "location", "n", "format"}
SHOWN = 19  # keys of a mapping that people need to see


def store() -> MemoryStore:
    """Return a store with two nodes' save: consolidated, found damaged, repaired and verified.

    Then one of them writes the same step again, an hour later.
    """
    made = MemoryStore()
    two_nodes(made)
    consolidate_due(made, BASE)
    snapshot = _verified(made)
    for _ in "there", "and back":
        flip(made, SHARD, 40_000)
        snapshot = _verified(made)
    again = DEMO / "zero3/node1/checkpoint-4"
    late = FIRST + 3600 * SECOND
    other = choose_location(manifest_of(again, "node1", at=late), snapshot.manifests)
    send(made, again, "node1", other, at=late)
    named = tuple(e.name for e in made.names(f"run/.ckptsync/{other}/") if "/manifest-" in e.name)
    parts = tuple(known.name for known in snapshot.manifests)
    put(made, Keep("run", "checkpoint-4", "checkpoint-4", 0, keeps=True, reason="best so far"))
    put(made, Join("run", "checkpoint-4", "checkpoint-4", 0, parts))
    put(
        made,
        Tombstone("run", "checkpoint-4", other, 0, named, "keep-last: 1", ended={"node1": late}),
    )
    return made


def _verified(made: MemoryStore) -> LocationState:
    snapshot = read_state(made).locations[0]
    write_report(made, verify_location(made, snapshot, VerifyOptions("digest")))
    return snapshot


def listing(made: MemoryStore) -> str:
    return "\n".join(entry.name for entry in made.names(""))


def examples(made: MemoryStore) -> Iterator[tuple[str, str]]:
    """Yield name and text of one record of each kind, shortened; common keys are in the first."""
    hidden: set[str] = set()
    for kind in ("manifest-node0", "model-0", "report-1", "keep", "join", "tombstone"):
        name = next(e.name for e in made.names("run/.ckptsync/") if f"/{kind}-" in e.name)
        record = json.loads(read_all(made, name))
        shown = {key: value for key, value in record.items() if key not in hidden}
        yield name, _indented(_short(shown))
        hidden = COMMON


def _indented(value: object, depth: int = 1) -> str:
    """Return JSON with one line a value; what fits on a line is not broken."""
    line = json.dumps(value, ensure_ascii=False)
    if len(line) + depth < 100 and depth > 1:
        return line
    opening, closing = ("{", "}") if isinstance(value, dict) else ("[", "]")
    values = value if isinstance(value, list) else []
    items = value.items() if isinstance(value, dict) else [("", v) for v in values]
    if not items:
        return line
    lines = [
        f"{' ' * depth}{json.dumps(key) + ': ' if key else ''}{_indented(v, depth + 1)}"
        for key, v in items
    ]
    return "\n".join([opening, ",\n".join(lines), f"{' ' * (depth - 1)}{closing}"])


def _short(value: object) -> object:
    if isinstance(value, list):
        return [_short(v) for v in value[:1]] + (["…"] if len(value) > 1 else [])
    if isinstance(value, dict):
        shown = list(value.items())[:SHOWN]
        return {k: _short(v) for k, v in shown} | ({"…": "…"} if len(value) > len(shown) else {})
    return value


def block(made: MemoryStore) -> str:
    parts = [f"```\n{listing(made)}\n```"]
    parts += [f"`{name}`:\n\n```json\n{text}\n```" for name, text in examples(made)]
    return "\n\n".join(parts)


def document(text: str) -> str:
    """Return ``text`` with a fresh listing between its two marks."""
    before, _, rest = text.partition("<!-- listing -->\n")
    _, _, after = rest.partition("<!-- end of listing -->")
    return f"{before}<!-- listing -->\n{block(store())}\n<!-- end of listing -->{after}"


if __name__ == "__main__":
    DOCUMENT.write_text(document(DOCUMENT.read_text()))
