"""Hostile zip archives, where ``torch.save`` would write honest ones."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tests.hostile.attack import CORRUPT, UNSUPPORTED, Attack, Sparse
from tests.hostile.pickles import PROTO2, dictionary, floats, item, metadata, number
from tests.support.files_in_memory import torch_zip_file

FILE = "global_step4/mp_rank_00_model_states.pt"


@dataclass(frozen=True)
class Row:
    """A record as the central directory tells it; ``None`` is the truth."""

    name: str
    data: bytes = b""
    size: int | None = None
    packed: int | None = None
    header: int | None = None
    method: int = 0
    flags: int = 0
    extra: bytes = b""
    local_name: bytes | None = None
    local_extra: bytes = b""
    magic: bytes = b"PK\x03\x04"


def archive(
    rows: list[Row],
    directory: tuple[int, int] | None = None,
    tail: bytes = b"",
    comment: bytes = b"",
    before: bytes = b"",
) -> bytes:
    """A zip in which every number may be a lie.

    ``directory`` is (size, start) as the end record tells it.
    """
    out, entries = io.BytesIO(), b""
    for row in rows:
        at, local = out.tell(), row.name.encode() if row.local_name is None else row.local_name
        size, lengths = len(row.data), (len(local), len(row.local_extra))
        local_head = (row.magic, 20, row.flags, row.method, size, size, *lengths)
        out.write(struct.pack("<4s3H8x2L2H", *local_head))
        out.write(local + row.local_extra + row.data)
        size, packed = (len(row.data) if n is None else n for n in (row.size, row.packed))
        header, told = at if row.header is None else row.header, row.name.encode()
        head = (b"PK\x01\x02", 20, 20, row.flags, row.method, packed, size)
        entries += struct.pack("<4s4H8x2L2H10xL", *head, len(told), len(row.extra), header)
        entries += told + row.extra
    end = end_record(len(rows), *(directory or (len(entries), out.tell())), len(comment))
    return out.getvalue() + entries + before + end + comment + tail


def end_record(count: int, size: int, start: int, comment: int = 0) -> bytes:
    return struct.pack("<4s4x2H2LH", b"PK\x05\x06", count, count, size, start, comment)


def plain(extra: dict[str, bytes] | None = None) -> list[Row]:
    """A model file with one tensor, w, of four floats."""
    pickle = (
        PROTO2
        + dictionary(
            {"dp_world_size": b"K\x01", "ds_config": b"}", "module": dictionary({"w": floats()})}
        )
        + b"."
    )
    records = {
        "archive/data.pkl": pickle,
        "archive/byteorder": b"little",
        "archive/data/0": b"\0" * 16,
        "archive/version": b"3",
        **(extra or {}),
    }
    return [Row(key, data) for key, data in records.items()]


def changed(which: str, **more: object) -> list[Row]:
    return [replace(row, **more) if row.name.endswith(which) else row for row in plain()]  # type: ignore[arg-type]


def _compressed() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", b"\0" * (64 << 20), compresslevel=1)
    return out.getvalue()


ONES = 0xFFFFFFFF
LIES: dict[str, bytes] = {
    "compressed-bomb": _compressed(),
    "compressed-method-in-the-directory-only": archive(changed("data.pkl", method=8)),
    "encrypted": archive(changed("data.pkl", flags=1)),
    "size-of-4GB": archive(changed("data.pkl", size=ONES - 1, packed=ONES - 1)),
    "storage-of-4GB": archive(changed("data/0", size=ONES - 1, packed=ONES - 1)),
    "storage-too-short": archive(changed("data/0", size=8, packed=8)),
    "pickle-too-short": archive(changed("data.pkl", size=8, packed=8)),
    "sizes-differ": archive(changed("data/0", packed=8)),
    "header-behind-the-end": archive(changed("data.pkl", header=ONES - 1)),
    "header-in-the-middle": archive(changed("data/0", header=1)),
    "header-of-another": archive(changed("data/0", header=0)),
    "no-local-header": archive(changed("data.pkl", magic=b"PK\x09\x09")),
    "local-extra-of-64KB": (
        archive(changed("data/0", local_name=b"x")).replace(b"x\0\0\0\0", b"x\0\0\0\0")
    ),
    "overlapping": archive([*plain(), Row("archive/data/1", b"", size=16, packed=16, header=0)]),
    "duplicate": archive([*plain(), Row("archive/data/0", b"\1" * 16)]),
    "two-pickles": archive([*plain(), Row("other/data.pkl", b"N.")]),
    "no-pickle": archive([Row("archive/data/0", b"\0" * 16)]),
    "nothing": archive([]),
    "big-endian": archive(changed("byteorder", data=b"big")),
    "odd-byteorder": archive(changed("byteorder", data=b"\xff" * 1000)),
    "zip64-without-field": archive(changed("data.pkl", size=ONES, packed=ONES, header=ONES)),
    "zip64-field-too-short": archive(
        changed("data.pkl", size=ONES, packed=ONES, extra=struct.pack("<2HQ", 1, 8, 5))
    ),
    "zip64-field-cut": archive(
        changed("data.pkl", size=ONES, packed=ONES, extra=struct.pack("<2HQ", 1, 24, 5))
    ),
    "zip64-size-of-2**64": archive(
        changed(
            "data.pkl",
            size=ONES,
            packed=ONES,
            extra=struct.pack("<2H2Q", 1, 16, 2**64 - 1, 2**64 - 1),
        )
    ),
    "zip64-header-of-2**64": archive(
        changed("data.pkl", header=ONES, extra=struct.pack("<2HQ", 1, 8, 2**64 - 1))
    ),
    "directory-behind-the-end": archive(plain(), directory=(100, 1 << 30)),
    "directory-of-4GB": archive(plain(), directory=(ONES - 1, 0)),
    "directory-of-nothing": archive(plain(), directory=(0, 0)),
    "directory-is-the-data": archive(plain(), directory=(46, 0)),
    "directory64-missing": archive(plain(), directory=(ONES, ONES)),
    "directory64-of-2**64": archive(
        plain(),
        directory=(ONES, ONES),
        before=struct.pack(
            "<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 1, 1, 2**64 - 1, 2**64 - 1
        )
        + struct.pack("<4sLQL", b"PK\x06\x07", 0, 0, 1),
    ),
    "locator-behind-the-end": archive(
        plain(),
        directory=(ONES, ONES),
        before=b"\0" * 56 + struct.pack("<4sLQL", b"PK\x06\x07", 0, 2**63, 1),
    ),
    "comment": archive(plain(), comment=b"PK\x05\x06" + b"\0" * 40),
    "something-after-the-end": archive(plain(), tail=b"\0" * 100),
    "two-end-records": archive(plain()) + archive([])[-22:],
    "only-an-end-record": archive([])[-22:],
    "names-with-dots": archive([Row("../../archive/data.pkl", b"N.")]),
    "text": b"PK\x03\x04" + b"A" * 1000,
    "legacy": PROTO2 + number(0x1950A86A20F9469CFC6C) + b".",
}


def attacks(_: str) -> Iterator[Attack]:
    for kind, content in LIES.items():
        if kind != "local-extra-of-64KB":
            yield Attack(
                kind, {FILE: content}, (UNSUPPORTED, CORRUPT), harmless=kind == "overlapping"
            )
            yield Attack(
                f"{kind}-as-item",
                {".metadata": metadata(len(content)), "__0_0.distcp": content},
                (UNSUPPORTED, CORRUPT),
            )
    yield from _sparse()
    yield from _items()


def _sparse() -> Iterator[Attack]:
    """Records of gigabytes that cost the attacker nothing, where a reader might take all of a
    record.
    """
    for kind in ("data.pkl", "byteorder"):
        rows = [row for row in plain() if not row.name.endswith(kind)]
        head = archive([Row(f"archive/{kind}")])[: 30 + len(f"archive/{kind}")]
        size = 3 << 30
        last = Row(f"archive/{kind}", size=size, packed=size, header=0)
        tail = archive(
            [last, *[replace(r, header=len(head) + size + at) for r, at in _placed(rows)]]
        )
        bodies = archive(rows)
        directory = tail[tail.index(b"PK\x01\x02") :]
        start = len(head) + size + len(bodies)
        end = end_record(len(rows) + 1, len(directory) - 22, start)
        pieces = {0: head, len(head) + size: bodies, start: directory[:-22] + end}
        yield Attack(
            f"{kind}-of-3GB", {FILE: Sparse(start + len(directory), pieces)}, (UNSUPPORTED, CORRUPT)
        )


def _placed(rows: list[Row]) -> Iterator[tuple[Row, int]]:
    at = 0
    for row in rows:
        yield row, at
        at += 30 + len(row.name) + len(row.data)


def _items() -> Iterator[Attack]:
    """Items of a DCP that overlap, or do not lie in their file."""
    good = item()
    for kind, start, length in (
        ("item-behind-the-end", number(1 << 40), len(good)),
        ("item-cut", b"K\x00", len(good) - 1),
        ("item-too-long", b"K\x00", len(good) + 1),
        ("item-of-2**62", b"K\x00", 2**62),
        ("item-of-nothing", b"K\x00", 0),
        ("item-one-byte-late", b"K\x01", len(good)),
    ):
        files = {".metadata": metadata(length, start=start), "__0_0.distcp": good}
        yield Attack(kind, files, (CORRUPT, UNSUPPORTED))
    names = {"data.pkl": b"N.", "version": b"3"} | {f"data/{i}": b"" for i in range(2000)}
    yield Attack("archive-of-nothing-but-names", {FILE: torch_zip_file(names)}, (CORRUPT,))
