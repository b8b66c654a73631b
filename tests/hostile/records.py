"""Hostile records: manifests and model records that anyone who may write to a store could leave
there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from ckptsync.digest import digest
from ckptsync.records.io import encode
from tests.support.verified_stores import LOCATION, RUN, WHOLE, manifest

Told = dict[str, Any]
OUTSIDE = (
    "../../../canary",
    "/etc/passwd",
    "a/../../b",
    "",
    ".",
    "a//b",
    "a\\b",
    "a\0b",
    "a\nb",
    "x" * 5000,
)


def _file(**more: Any) -> Callable[[Told], None]:
    return lambda told: told["files"][0].update(more)


def _top(**more: Any) -> Callable[[Told], None]:
    return lambda told: told.update(more)


CHANGES: dict[str, Callable[[Told], None]] = {
    **{f"path-{i}": _file(path=path) for i, path in enumerate(OUTSIDE)},
    "negative-size": _file(size=-1),
    "size-is-text": _file(size="1"),
    "digest-is-a-path": _file(digest="../" * 20 + "aaaa"),
    "no-blocks": _file(blocks=[]),
    "block-size-of-0": _file(block_size=0),
    "block-size-negative": _file(block_size=-1),
    "location-above": _top(location=".."),
    "location-below": _top(location="a/b"),
    "another-run": _top(run="../other"),
    "node-above": _top(node=".."),
    "node-with-slash": _top(node="a/b"),
    "supersedes-anything": _top(supersedes=["../../x"]),
    "demands-outside": _top(demands={"model": {"../x": 1}, "resume": {}, "world": None}),
    "files-is-null": _top(files=None),
    "numbers-as-text": _top(n="0"),
    "ends-before-it-starts": _top(started=10, ended=1),
}


def manifests() -> Iterator[tuple[str, str, bytes]]:
    """What is wrong, the record's name, which its bytes deserve, and the bytes."""
    for kind, change in CHANGES.items():
        told = json.loads(encode(manifest(WHOLE)))
        change(told)
        yield kind, *_named(json.dumps(told).encode())
    yield "not-json", *_named(b"\xff")
    yield "deep", *_named(b"[" * 1_000_000)
    yield "a-list", *_named(b"[]")
    yield "nothing", *_named(b"")
    yield (
        "another-digest",
        f"{RUN}/.ckptsync/{LOCATION}/manifest-n0-0-{'0' * 16}.json",
        encode(manifest(WHOLE)),
    )


def _named(data: bytes) -> tuple[str, bytes]:
    return f"{RUN}/.ckptsync/{LOCATION}/manifest-n0-0-{digest(data)[:16]}.json", data
