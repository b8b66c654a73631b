"""``ckptsync verify`` as a transcript."""

import json
from pathlib import Path

import pytest

from ckptsync.cli.main import main
from tests.cli_store import DATA, SHARD, flip, make


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return make(tmp_path / "store")


def test_verify_lists_what_is_arriving_and_exits_0(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(store)]) == 0
    said = capsys.readouterr().out
    assert "fsdp2/checkpoint-4: ok (level digest, 499 KB read)" in said
    assert "zero3/checkpoint-4: ARRIVING (level digest, " in said


def test_verify_names_the_file_and_the_tensors_and_exits_10(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(store / "fsdp2" / SHARD)
    assert main(["verify", str(store), "--json"]) == 10
    reports = {r["run"]: r for r in json.loads(capsys.readouterr().out)["reports"]}
    [finding] = [f for f in reports["fsdp2"]["findings"] if f["kind"] == "digest"]
    assert finding["name"] == SHARD
    assert finding["tensors"]
    assert main(["verify", str(store / "fsdp2" / "checkpoint-4")]) == 10
    said = capsys.readouterr().out
    assert "fsdp2/checkpoint-4: DAMAGED" in said
    assert f"digest: {SHARD}: " in said
    assert f"; overlaps {finding['tensors'][0]}" in said
    assert main(["verify", str(store / "zero3"), "--level", "stat"]) == 0


@pytest.mark.parametrize(("target", "code"), [("fsdp2/node0/checkpoint-4", 3), ("base", 5), ("absent", 2)])
def test_verify_of_a_plain_directory_has_no_digests_and_says_so(target: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(DATA / target)]) == code
    out, err = capsys.readouterr()
    assert err if code != 3 else "nothing recorded what these bytes should be" in out
