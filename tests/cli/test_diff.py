"""``ckptsync diff`` as a transcript: what users compare, what is said, and the exit code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptsync.digest import digest as digest_of
from tests.support.command_line import Cli
from tests.support.files_in_memory import safetensors_file
from tests.support.small_store import DATA, flip, make_two
from tests.support.stand_in_programs import ROOT

VECTORS = ROOT / "tests/vectors"
ZERO = VECTORS / "hf-zero2/out/checkpoint-4"
ADAPTER = VECTORS / "peft-adapter/out"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of one run, both consolidated, with the same weights."""
    return make_two(tmp_path_factory.mktemp("diff") / "store")


@pytest.fixture(autouse=True)
def _no_store_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CKPTSYNC_STORE", raising=False)


def told(cli: Cli, *words: object, code: int) -> str:
    """What was printed."""
    return "".join(cli("diff", *words, code=code))


def document(cli: Cli, *words: object, code: int) -> dict[str, Any]:
    result: dict[str, Any] = cli("diff", *words, "--json", code=code).json
    assert result["exit_code"] == code
    return result


def model(path: Path, **tensors: np.ndarray) -> Path:
    """A directory with a whole model of these tensors."""
    path.mkdir()
    types = {"f4": "F32", "f2": "F16"}
    file = safetensors_file(
        {name: (types[v.dtype.str[1:]], v.shape, v.tobytes()) for name, v in tensors.items()}
    )
    (path / "model.safetensors").write_bytes(file)
    return path


ONES = np.ones((2, 2), "<f4")


def test_what_differs_is_listed_and_the_exit_code_is_1(tmp_path: Path, cli: Cli) -> None:
    changed = ONES.copy()
    changed[0, 0] = 2
    a = model(tmp_path / "a", **{"mlp.x": ONES, "norm.x": ONES, "p": ONES, "t": ONES, "s": ONES})
    b = model(tmp_path / "b", **{"mlp.x": changed, "norm.x": ONES, "q": ONES,
                                 "t": ONES.astype("<f2"), "s": ONES[:1]})  # fmt: skip
    assert told(cli, a, b, code=1).splitlines() == [
        f"A  {a}: whole:., 5 tensors, 80 B",
        f"B  {b}: whole:., 5 tensors, 64 B",
        (
            "1 of 6 tensors are the same, 1 changed, 1 of another type, 1 of another shape, 1 only"
            " in A, 1 only in B; relative change 0.3536"
        ),
        "",
        "GROUP  SAME  OTHER  RELATIVE  LARGEST",
        "mlp    0     1      0.5       1",
        "norm   1     0      -         -",
        "other  0     4      0         0",
        "",
        "TENSOR              RELATIVE  LARGEST  ELEMENTS",
        "s       2x2 to 1x2  -         -        -",
        "mlp.x   changed     0.5       1        1 of 4",
        "t       F32 to F16  0         0        0 of 4",
        "p       only in A   -         -        -",
        "q       only in B   -         -        -",
    ]
    lines = told(cli, a, b, "--top", "1", code=1).splitlines()
    assert lines[-4:] == [
        "s       2x2 to 1x2  -         -        -",
        "p       only in A   -         -        -",
        "q       only in B   -         -        -",
        "and 2 more (--top N shows more)",
    ]
    result = document(cli, a, b, code=1)
    assert [(t["name"], t["state"]) for t in result["tensors"]] == [
        ("s", "shape"), ("mlp.x", "changed"), ("t", "dtype"), ("p", "only_a"), ("q", "only_b")
    ]  # fmt: skip
    assert [t["relative"] for t in result["tensors"]] == [None, 0.5, 0.0, None, None]
    assert result["same"] == 1


def test_shards_are_compared_as_a_merge_would_write_them(tmp_path: Path, cli: Cli) -> None:
    nodes = [DATA / "fsdp2" / node / "checkpoint-4" for node in ("node0", "node1")]
    merged = tmp_path / "merged"
    cli("merge", *nodes, merged)
    assert "same: all 21 tensors" in told(cli, *nodes, merged, code=0)
    assert "__1_0.distcp: not found" in told(cli, nodes[0], merged, code=3)
    assert "same: all 21" in told(
        cli, ZERO, ZERO, "--source", "zero:global_step4", "--source", "", code=0
    )
    bf16 = tmp_path / "bf16"
    cli("merge", ZERO, bf16, "--dtype", "bf16")
    result = document(cli, ZERO, bf16, "--source", "whole:.", code=1)
    assert (result["dtype"], result["changed"]) == (21, 0)
    assert 0 < result["relative"] < 2**-8


def test_names_with_wrappers_are_the_models_own(tmp_path: Path, cli: Cli) -> None:
    a = model(tmp_path / "a", **{"module._orig_mod.x": ONES, "module.y": ONES})
    b = model(tmp_path / "b", x=ONES, y=ONES)
    result = document(cli, a, b, code=0)
    assert (result["same"], result["bytes_read"]) == (2, 64)


def test_adapters_are_compared_and_a_model_is_no_adapter(tmp_path: Path, cli: Cli) -> None:
    same = shutil.copytree(ADAPTER, tmp_path / "adapter")
    assert "same: all 9 tensors" in told(cli, ADAPTER, same, code=0)
    file = same / "adapter_model.safetensors"
    data = bytearray(file.read_bytes())
    data[-2:] = b"\x00\x40"
    file.write_bytes(data)
    result = document(cli, ADAPTER, same, code=1)
    assert (result["same"], result["changed"], result["tensors"][0]["differing"]) == (8, 1, 1)
    result = document(cli, ADAPTER, VECTORS / "base", code=1)
    assert (result["only_a"], result["only_b"]) == (9, 21)


def test_consolidated_models_are_compared_by_digests(store: Path, tmp_path: Path, cli: Cli) -> None:
    here = ("--store", store)
    names = "fsdp2/checkpoint-4", "fsdp2/checkpoint-5"
    result = document(cli, *names, *here, code=0)
    assert (result["same"], result["bytes_read"], result["a"]["has_digests"]) == (21, 0, True)
    assert document(cli, *names, "--digests", *here, code=0)["same"] == 21
    url = store / "fsdp2" / "checkpoint-5"
    assert document(cli, names[0], url, *here, code=0)["bytes_read"] == 0
    assert document(cli, store / "fsdp2" / "checkpoint-4", url, code=0)["bytes_read"] == 0
    shards = ("--source", "", "--source", "dcp:pytorch_model_fsdp_0")
    result = document(cli, *names, *shards, *here, code=0)
    assert (result["same"], result["b"]["has_digests"], result["bytes_read"]) == (21, False, 78240)
    copied = shutil.copytree(store, tmp_path / "store")
    flip(next((copied / "fsdp2/consolidated/checkpoint-5").glob("*.safetensors")))
    damaged = "its bytes are not those that were recorded"
    base = VECTORS / "base"
    assert damaged in told(cli, names[1], base, "--store", copied, code=10)
    assert document(cli, *names, "--store", copied, code=0)["same"] == 21, "nothing is read"


def test_digests_alone_say_which_tensors_differ(store: Path, tmp_path: Path, cli: Cli) -> None:
    copied = shutil.copytree(store, tmp_path / "store")
    record = max((copied / "fsdp2/.ckptsync/checkpoint-5").glob("model-*.json"))
    text = record.read_text()
    digest = json.loads(text)["tensors"][0]["digest"]
    other = text.replace(digest, "0" * 64)
    stem = record.name.rpartition("-")[0]
    record.unlink()
    data = other.encode()
    record.with_name(f"{stem}-{digest_of(data)[:16]}.json").write_bytes(data)
    words = ("fsdp2/checkpoint-4", "fsdp2/checkpoint-5", "--store", copied)
    result = document(cli, *words, "--digests", code=1)
    assert (result["same"], result["changed"], result["bytes_read"]) == (20, 1, 0)
    assert result["tensors"][0]["relative"] is None
    told(cli, *words, code=10)


def test_a_path_without_a_mark_beside_a_named_store_is_hinted_at(
    store: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    model(tmp_path / "merged", x=ONES)
    monkeypatch.chdir(tmp_path)
    words = ("fsdp2/checkpoint-4", "merged", "--store", store)
    assert "hint: ./merged names the directory" in told(cli, *words, code=2)
    assert "only in B" in told(cli, words[0], "./merged", *words[2:], code=1)
    assert "same: all 1" in told(cli, "merged", "merged", code=0)
    file = told(cli, "merged", "merged/model.safetensors", code=2)
    assert "not a directory" in file  # and no hint that takes the file for one
    assert "names the directory" not in file


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("fsdp2", "fsdp2/checkpoint-4"), 2, "fsdp2: expected RUN/CHECKPOINT"),
        (("fsdp2/checkpoint-4", "fsdp2/checkpoint-9"), 2, "checkpoint 'checkpoint-9' not found"),
        (("zero3/checkpoint-4", "fsdp2/checkpoint-4"), 3, "zero3/checkpoint-4: global_step4/zero"),
        (("fsdp2/checkpoint-4", ZERO, "--digests"), 2, "no digests of its tensors are recorded"),
        (("fsdp2/checkpoint-4", ZERO, "--top", "-1"), 2, "--top: expected at least 0"),
        (("fsdp2/checkpoint-4", ZERO, *("--source", "x") * 3), 2, "--source: given more than"),
        (("fsdp2/checkpoint-4", ZERO.parent / "absent"), 2, "absent: no such directory"),
    ],
)
def test_what_cannot_be_compared_is_an_error_with_its_own_code(
    words: tuple[object, ...], code: int, message: str, store: Path, cli: Cli
) -> None:
    assert message in told(cli, *words, "--store", store, code=code)
