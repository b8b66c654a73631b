"""Doors that a checkpoint comes through: damage to real ones, other values in well-made ones
(judged against torch), and pickles.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import cast

from ckptsync.merger.inspection import inspect_checkpoint
from ckptsync.merger.plan import MergeOptions
from ckptsync.stores.checkpoint_files import DirectoryFiles
from tests.campaigns.damaged import HOUR, Damage, Kind, Patient, resaved
from tests.campaigns.fuzz import Case, Door, Wrong, by_dice
from tests.campaigns.fuzz_changes import changed_bytes, changed_json
from tests.campaigns.uncovered import reason
from tests.hostile import pickles
from tests.support.files_in_memory import write_files
from tests.support.merge_on_disk import merge_local
from tests.support.vector import vector, vectors

# damage to a vector


@cache
def _patient(name: str) -> Patient:
    with tempfile.TemporaryDirectory() as made:
        return Patient(vector(name), Path(made).resolve())


@cache
def _names() -> tuple[str, ...]:
    return tuple(v.name for v in vectors())


def _make_damage(dice: random.Random) -> Case:
    """``start``, ``end``, ``data``: those bytes of ``file`` are others.

    ``end`` is -1 where the file is gone.
    """
    name = dice.choice(_names())
    patient = _patient(name)
    way = dice.randrange(len(patient.ways))
    file = dice.choice(sorted(patient.ways[way].strata))
    good = patient.files[file]
    kinds: list[Kind] = ["flip", "flip", "flip", "cut", "grow", "delete", "older"]
    kind, data = dice.choice(kinds), good
    if kind == "flip":
        while data == good and good:
            data = _written_over(good, file, dice)
        kind = "flip" if len(data) == len(good) else "cut" if len(data) < len(good) else "grow"
    elif kind == "cut":
        data = good[: dice.randrange(len(good) + 1)]
    elif kind == "grow":
        data = good + dice.choice(
            (bytes(dice.randrange(1, 9)), good[: dice.randrange(len(good) + 1)], dice.randbytes(30))
        )
    elif kind == "older":
        data = resaved(file, good, patient.files) or good
    start = next(
        (i for i, (a, b) in enumerate(zip(good, data, strict=False)) if a != b),
        min(len(good), len(data)),
    )
    same = next(
        (i for i in range(min(len(good), len(data)) - start) if good[-1 - i] != data[-1 - i]),
        min(len(good), len(data)) - start,
    )
    end = -1 if kind == "delete" else len(good) - same
    age = dice.choice((HOUR, -HOUR)) if kind == "older" else 0
    return {
        "vector": name,
        "way": way,
        "kind": kind,
        "file": file,
        "start": start,
        "end": end,
        "data": data[start : len(data) - same],
        "age": age,
    }


def _written_over(good: bytes, file: str, dice: random.Random) -> bytes:
    if file.endswith(".json"):
        return changed_json(good, dice)
    at, many, kind = dice.randrange(len(good)), dice.choice((1, 4, 8, 64, 512)), dice.randrange(5)
    if kind == 0:
        return changed_bytes(good, dice)
    if kind == 1:  # what lies elsewhere in the file
        other = dice.randrange(len(good))
        return (
            good[:at]
            + good[other : other + len(good[at : at + many])]
            + good[at + len(good[other : other + many]) :]
        )
    if kind == 2:
        return good[:at] + bytes(len(good[at : at + many])) + good[at + many :]
    out = bytearray(good)
    for _ in range(dice.choice((1, 1, 2, 8))):
        out[dice.randrange(len(out))] ^= 1 << dice.randrange(8)
    return bytes(out)


def _run_damage(case: Case, home: Path) -> str:
    patient = _patient(case["vector"]).moved(home / "in")
    good, file = patient.files[case["file"]], case["file"]
    data = None if case["end"] < 0 else good[: case["start"]] + case["data"] + good[case["end"] :]
    damage = Damage(cast(Kind, case["kind"]), file, "", {file: data}, age=case["age"])
    if case["kind"] == "older":
        damage = Damage(
            "newer" if case["age"] < 0 else "older", file, "", {file: data}, age=case["age"]
        )
    with patient.damaged(damage):
        outcome = patient.merge(patient.ways[case["way"]])
        why = reason(damage, outcome, patient.files) if outcome.word in ("SILENT", "beside") else ""
        if outcome.word in ("refused", "harmless") or why:
            return outcome.word if not why else "not covered"
    raise Wrong(f"{outcome.word}: {damage}: {outcome.said}")


# pickles

P61 = 2**61 - 1  # the modulus of the hash of numbers
_OPCODES = b"(t]})\x85\x86\x8702aesuRbQ\x81\x8f\x90\x91N\x881\x94."  # those without an argument


def _make_pickle(dice: random.Random) -> Case:
    """Random opcodes, many of the same, where a format reads a pickle."""
    names = [
        ("collections", "OrderedDict"),
        ("torch", "Size"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch", "FloatStorage"),
        ("builtins", "set"),
        ("torch", "device"),
    ]
    made: list[bytes] = []
    left = dice.choice((30, 300, 300_000))
    while left > 0 and len(made) < 60:
        kind = dice.randrange(12)
        if kind <= 4:
            piece = bytes([dice.choice(_OPCODES)])
        elif kind == 5:
            piece = dice.choice((b"q", b"h")) + bytes([dice.randrange(4)])
        elif kind == 6:
            piece = pickles.number(
                dice.choice(
                    (0, 1, -1, P61, P61 * dice.randrange(99), 2**63, dice.randrange(1 << 30))
                )
            )
        elif kind == 7:
            piece = pickles.text(dice.choice(("", "a", "storage", "0", "x" * 1000)))
        elif kind == 8:
            piece = pickles.name(*dice.choice(names))
        elif kind == 9:
            piece = pickles.bomb(dice.choice((3, 60)))
        elif kind == 10:
            piece = b")q\x00" + b"h\x00h\x00\x86q\x00"
        else:
            piece = b"".join(pickles.number(n * P61) for n in range(dice.choice((1, 3, 3000))))
        count = dice.choice((1, 1, 1, 1, 2, 10, 1000, 100_000))
        piece = piece * max(1, min(count, left // len(piece)))
        made.append(piece)
        left -= len(piece)
    if dice.randrange(3) == 0:  # what it ends with is called
        made += [pickles.name(*dice.choice(names)), b"(", made[-1], b"t", b"R"]
    proto = dice.choice((pickles.PROTO2, pickles.PROTO4))
    return {"place": dice.choice(sorted(pickles.PLACES)), "pickle": proto + b"".join(made) + b"."}


def _run_pickle(case: Case, home: Path) -> str:
    root = home / "in"
    write_files(root, pickles.PLACES[case["place"]](case["pickle"]))
    code = inspect_checkpoint(DirectoryFiles(str(root))).exit_code
    if code not in (0, 3, 5, 10):
        raise Wrong(f"inspect: exit code {code}")
    merge_local([root], home / "out" / "new", MergeOptions())
    return "merged"


DOORS: Mapping[str, Door] = {
    "merge-damage": Door(by_dice(_make_damage), _run_damage, ("in",)),
    "pickles": Door(by_dice(_make_pickle), _run_pickle, ("in", "out")),
}
