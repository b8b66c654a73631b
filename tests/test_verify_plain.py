"""A directory of which nothing was recorded: what can be said, and what cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptsync.errors import Incomplete, Unsupported
from ckptsync.records.report import Level, Report
from ckptsync.stores.tree import LocalFiles
from ckptsync.verify.plain import NO_DIGESTS, verify_path
from tests.plain_files import safetensors_file, tree
from tests.vector import vector
from tests.verified import WHOLE, damage

SHARDS = tree(*vector("hf-fsdp2-2node").sources).content


def written(root: Path, files: dict[str, bytes]) -> LocalFiles:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return LocalFiles(str(root))


def verified(root: Path, files: dict[str, bytes], level: Level = "parse") -> Report:
    return verify_path(written(root, files), level, "checkpoint-4")


@pytest.mark.parametrize("files", [WHOLE, SHARDS], ids=["whole", "shards"])
def test_what_parses_is_well_and_no_digest_is_claimed(tmp_path: Path, files: dict[str, bytes]) -> None:
    report = verified(tmp_path, files)
    assert (report.verdict, report.level) == ("ok", "parse")
    assert [f.detail for f in report.findings if "CRC32s" not in f.detail] == [NO_DIGESTS]
    assert 0 < report.read < 3 * sum(map(len, files.values()))


def test_level_digest_proves_no_more_than_stat_here_and_says_so(tmp_path: Path) -> None:
    report = verified(tmp_path, WHOLE, "digest")
    assert (report.level, report.verdict) == ("stat", "ok")
    assert [f.detail for f in report.findings] == [NO_DIGESTS]


def test_level_load_loads_the_whole_files(tmp_path: Path) -> None:
    files = {"model.safetensors": safetensors_file({"a": ("F32", (1,), b"\0\0\xc0\x7f")})}
    report = verified(tmp_path, files, "load")
    assert (report.level, report.verdict) == ("load", "ok")
    assert [(f.name, f.tensors) for f in report.findings if f.kind == "nonfinite"] == [("model.safetensors", ("a",))]


def test_what_its_metadata_demands_and_is_not_there_is_missing(tmp_path: Path) -> None:
    gone = next(p for p in SHARDS if p.startswith("pytorch_model") and p.endswith("__1_0.distcp"))
    report = verified(tmp_path, {p: data for p, data in SHARDS.items() if p != gone}, "stat")
    assert (report.verdict, damage(report)) == ("arriving", [("missing", gone)])


def test_a_directory_without_its_metadata_is_not_called_well(tmp_path: Path) -> None:
    report = verified(tmp_path, {p: data for p, data in SHARDS.items() if not p.endswith(".metadata")})
    assert report.verdict == "arriving"


def test_a_shard_that_was_cut_is_damage_at_every_level(tmp_path: Path) -> None:
    cut = next(p for p in SHARDS if p.startswith("pytorch_model") and p.endswith(".distcp"))
    report = verified(tmp_path, {**SHARDS, cut: SHARDS[cut][:-1]}, "stat")
    assert (report.verdict, damage(report)) == ("damaged", [("size", cut)])


def test_what_does_not_parse_is_damage(tmp_path: Path) -> None:
    report = verified(tmp_path, {**WHOLE, "config.json": b"{"})
    assert damage(report) == [("parse", "config.json")]


def test_what_no_layout_knows_is_unsupported(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="no known checkpoint"):
        verified(tmp_path, {"notes.txt": b"x"})


def test_a_directory_that_changes_meanwhile_is_not_judged(tmp_path: Path) -> None:
    files = written(tmp_path, WHOLE)
    (tmp_path / "config.json").write_bytes(b"{}")
    with pytest.raises(Incomplete, match="changed"):
        verify_path(files, "parse")


def test_what_was_not_looked_at_is_noted(tmp_path: Path) -> None:
    written(tmp_path, WHOLE)
    (tmp_path / "extra.safetensors").symlink_to("model.safetensors")
    report = verify_path(LocalFiles(str(tmp_path)), "digest", "here")
    assert report.verdict == "ok"
    assert "extra.safetensors: not looked at, since links are not followed" in [f.detail for f in report.findings]
