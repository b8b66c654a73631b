"""Names that reach out of a checkpoint: in indexes, in ``.metadata``, through links."""

from __future__ import annotations

import json
from collections.abc import Iterator

from tests.hostile.attack import CORRUPT, INCOMPLETE, UNSUPPORTED, Attack, Sparse
from tests.hostile.pickles import bomb, item, metadata, text
from tests.support.files_in_memory import safetensors_file

GOOD = safetensors_file({"w": ("F32", (4,), b"\0" * 16)})
INDEX = "model.safetensors.index.json"
OUTSIDE = {
    "dots": "../secret.safetensors",
    "absolute": "/etc/passwd",
    "nul": "model\0.safetensors",
    "long": "a" * 5000 + ".safetensors",
    "below": "sub/model.safetensors",
    "another-kind": "training_args.bin",
}


def attacks(_: str) -> Iterator[Attack]:
    for kind, value in OUTSIDE.items():
        index = json.dumps({"weight_map": {"w": value}}).encode()
        files = {INDEX: index, "model-00001-of-00001.safetensors": GOOD}
        yield Attack(f"index-{kind}", files, (CORRUPT,))
        # plain names there: the file is only not there
        if kind not in ("another-kind", "below"):
            files = {".metadata": metadata(len(item()), text(value)), "__0_0.distcp": item()}
            yield Attack(f"metadata-{kind}", files, (CORRUPT,))
    yield from _indexes()
    yield from _links()


def _indexes() -> Iterator[Attack]:
    one = {"model-00001-of-00001.safetensors": GOOD}
    contents: dict[str, bytes | Sparse] = {
        "not-json": b"\xff\xfe",
        "a-list": b"[]",
        "no-map": b"{}",
        "map-of-numbers": b'{"weight_map": {"w": 1}}',
        "map-of-lists": b'{"weight_map": {"w": ["model.safetensors"]}}',
        "map-is-a-list": b'{"weight_map": ["model.safetensors"]}',
        "map-is-null": b'{"weight_map": null}',
        "deep": b'{"weight_map": ' + b"[" * 1_000_000,
        "number": b'{"weight_map": ' + b"9" * 1_000_000 + b"}",
        "itself": json.dumps({"weight_map": {"w": INDEX}}).encode(),
        "of-200MB": Sparse(200 << 20, {0: b"{"}),
        "of-another-tensor": json.dumps({"weight_map": dict.fromkeys("v", *one)}).encode(),
    }
    for kind, content in contents.items():
        yield Attack(f"index-is-{kind}", {INDEX: content, **one}, (CORRUPT,))
    gone = json.dumps({"weight_map": {"w": "model-00002-of-00002.safetensors"}}).encode()
    yield Attack("index-names-what-is-not-there", {INDEX: gone}, (INCOMPLETE,))
    deep = b"[" * 1_000_000
    beside: dict[str, bytes | Sparse] = {"config.json": deep, "trainer_state.json": deep}
    beside |= {"training_args.bin": bomb(), "latest": Sparse(200 << 20)}
    for name, data in beside.items():
        files = {"model.safetensors": GOOD, name: data}
        yield Attack(f"{name}-beside-a-model", files, (CORRUPT,), harmless=True)
    yield Attack("two-sets", {**one, "model-00001-of-00002.safetensors": GOOD}, (CORRUPT,))
    yield Attack("huge-set", {"model-00001-of-99999.safetensors": GOOD}, (INCOMPLETE,))


OTHER_WEIGHTS = {
    "link-to-a-file": {"model.safetensors": "/etc/passwd"},
    "link-up": {"model.safetensors": "../canary"},
    "link-to-a-device": {"model.safetensors": "/dev/zero"},
    "link-to-itself": {"model.safetensors": "model.safetensors"},
    "link-to-a-directory": {"pytorch_model_fsdp_0": "/etc"},
}


def _links() -> Iterator[Attack]:
    for kind, links in OTHER_WEIGHTS.items():
        yield Attack(kind, {"config.json": b"{}"}, (UNSUPPORTED, INCOMPLETE), links)
    to = "/etc/passwd"
    told = {".metadata": metadata(len(item()))}
    yield Attack("shard-is-a-link", told, (INCOMPLETE,), {"__0_0.distcp": to})
    files = {"__0_0.distcp": item()}
    yield Attack("metadata-is-a-link", files, (INCOMPLETE, UNSUPPORTED), {".metadata": to})
    index = {INDEX: json.dumps({"weight_map": {"w": "model-1.safetensors"}}).encode()}
    yield Attack("index-through-a-link", index, (INCOMPLETE,), {"model-1.safetensors": to})
    files = {"model.safetensors": GOOD}
    yield Attack("config-is-a-link", files, (), {"config.json": to}, harmless=True)
