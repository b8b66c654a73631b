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
    "dots-inside": "a/../../secret.safetensors",
    "absolute": "/etc/passwd",
    "absolute-safetensors": "/tmp/secret.safetensors",
    "dot": ".",
    "double-slash": "//secret.safetensors",
    "backslash": "..\\secret.safetensors",
    "nul": "model\0.safetensors",
    "newline": "model\n.safetensors",
    "empty": "",
    "long": "a" * 5000 + ".safetensors",
    "surrogate": "\ud800.safetensors",
    "below": "sub/model.safetensors",
    "another-kind": "training_args.bin",
}


def attacks(_: str) -> Iterator[Attack]:
    for kind, value in OUTSIDE.items():
        yield Attack(
            f"index-{kind}",
            {
                INDEX: json.dumps({"weight_map": {"w": value}}).encode(),
                "model-00001-of-00001.safetensors": GOOD,
            },
            (CORRUPT,),
        )
        # plain names there: the file is only not there
        if kind not in ("surrogate", "another-kind", "below"):
            yield Attack(
                f"metadata-{kind}",
                {".metadata": metadata(len(item()), text(value)), "__0_0.distcp": item()},
                (CORRUPT,),
            )
    yield from _indexes()
    yield from _links()


def _indexes() -> Iterator[Attack]:
    contents: dict[str, bytes] = {
        "not-json": b"\xff\xfe",
        "a-list": b"[]",
        "no-map": b"{}",
        "map-of-numbers": b'{"weight_map": {"w": 1}}',
        "map-of-lists": b'{"weight_map": {"w": ["model.safetensors"]}}',
        "map-is-a-list": b'{"weight_map": ["model.safetensors"]}',
        "map-is-null": b'{"weight_map": null}',
        "deep": b'{"weight_map": ' + b"[" * 1_000_000,
        "number": b'{"weight_map": ' + b"9" * 1_000_000 + b"}",
        "names-itself": json.dumps({"weight_map": {"w": INDEX}}).encode(),
    }
    for kind, content in contents.items():
        yield Attack(
            f"index-is-{kind}",
            {INDEX: content, "model-00001-of-00001.safetensors": GOOD},
            (CORRUPT,),
        )
    yield Attack(
        "index-of-200MB",
        {INDEX: Sparse(200 << 20, {0: b"{"}), "model-00001-of-00001.safetensors": GOOD},
        (CORRUPT,),
    )
    told = json.dumps({"weight_map": {"v": "model-00001-of-00001.safetensors"}}).encode()
    yield Attack(
        "index-names-another-tensor",
        {INDEX: told, "model-00001-of-00001.safetensors": GOOD},
        (CORRUPT,),
    )
    gone = json.dumps({"weight_map": {"w": "model-00002-of-00002.safetensors"}}).encode()
    yield Attack("index-names-what-is-not-there", {INDEX: gone}, (INCOMPLETE,))
    deep = b"[" * 1_000_000
    yield Attack(
        "deep-config", {"model.safetensors": GOOD, "config.json": deep}, (CORRUPT,), harmless=True
    )
    yield Attack(
        "deep-trainer-state",
        {"model.safetensors": GOOD, "trainer_state.json": deep},
        (CORRUPT,),
        harmless=True,
    )
    yield Attack(
        "bomb-in-training-args",
        {"model.safetensors": GOOD, "training_args.bin": bomb()},
        (CORRUPT,),
        harmless=True,
    )
    yield Attack(
        "two-sets",
        {"model-00001-of-00001.safetensors": GOOD, "model-00001-of-00002.safetensors": GOOD},
        (CORRUPT,),
    )
    yield Attack("huge-set", {"model-00001-of-99999.safetensors": GOOD}, (INCOMPLETE,))
    yield Attack(
        "latest-of-200MB",
        {"latest": Sparse(200 << 20), "model.safetensors": GOOD},
        (CORRUPT,),
        harmless=True,
    )


def _links() -> Iterator[Attack]:
    yield Attack(
        "link-to-a-file",
        {"config.json": b"{}"},
        (UNSUPPORTED, INCOMPLETE),
        {"model.safetensors": "/etc/passwd"},
    )
    yield Attack(
        "link-up",
        {"config.json": b"{}"},
        (UNSUPPORTED, INCOMPLETE),
        {"model.safetensors": "../canary"},
    )
    yield Attack(
        "link-to-a-device",
        {"config.json": b"{}"},
        (UNSUPPORTED, INCOMPLETE),
        {"model.safetensors": "/dev/zero"},
    )
    yield Attack(
        "link-to-itself",
        {"config.json": b"{}"},
        (UNSUPPORTED, INCOMPLETE),
        {"model.safetensors": "model.safetensors"},
    )
    yield Attack(
        "link-to-a-directory",
        {"config.json": b"{}"},
        (UNSUPPORTED, INCOMPLETE),
        {"pytorch_model_fsdp_0": "/etc"},
    )
    yield Attack(
        "shard-is-a-link",
        {".metadata": metadata(len(item()))},
        (INCOMPLETE,),
        {"__0_0.distcp": "/etc/passwd"},
    )
    yield Attack(
        "metadata-is-a-link",
        {"__0_0.distcp": item()},
        (INCOMPLETE, UNSUPPORTED),
        {".metadata": "/etc/passwd"},
    )
    yield Attack(
        "index-through-a-link",
        {INDEX: json.dumps({"weight_map": {"w": "model-1.safetensors"}}).encode()},
        (INCOMPLETE,),
        {"model-1.safetensors": "/etc/passwd"},
    )
    yield Attack(
        "config-is-a-link",
        {"model.safetensors": GOOD},
        (),
        {"config.json": "/etc/passwd"},
        harmless=True,
    )
