from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ckptsync.catalogue.fresh import fresh
from ckptsync.errors import ConfigError
from ckptsync.hooks import ray_note, ray_validate
from ckptsync.hooks.ray import validate
from ckptsync.hooks.ray_upload import Part, send
from ckptsync.records.report import Finding, Report
from ckptsync.stores.opening import open_store
from tests.ray_checkpoints import Checkpoint, Disk
from tests.vector import vector

NAME = "checkpoint_000001"


def stored(tmp_path: Path) -> Checkpoint:
    part = tmp_path / "tmp0"
    part.mkdir()
    (part / "state").write_bytes(b"0" * 1000)
    note = send(part, str(tmp_path / "store"), Part("sft", NAME, 0))
    assert note is not None
    ray_note.write(Disk(), str(tmp_path / "experiment" / NAME), note)
    return Checkpoint(str(tmp_path / "experiment" / NAME))


def test_a_checkpoint_in_a_store_is_read_and_said_to_be_well(tmp_path: Path) -> None:
    told = validate(stored(tmp_path))
    assert (told["ckptsync_verdict"], told["ckptsync_findings"]) != ("damaged", [])
    assert told["ckptsync_verdict"] in ("ok", "arriving")
    assert told["ckptsync_read"] >= 1000


def test_damage_is_a_metric_and_no_exception(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = stored(tmp_path)
    (tmp_path / "store" / "sft" / NAME / "state").write_bytes(b"0" * 999 + b"1")
    told = validate(checkpoint, level="digest")
    assert told["ckptsync_verdict"] == "damaged"
    assert "state" in told["ckptsync_findings"][0]
    assert f"{tmp_path}/store/sft/{NAME}" in caplog.text
    (seen,) = fresh(open_store(str(tmp_path / "store"))).locations
    assert seen.status == "DAMAGED"  # it is recorded, so that a worker sends it again


@pytest.mark.parametrize("config", [None, {}, {"level": "digest"}])
def test_a_report_of_an_older_version_gives_a_configuration(tmp_path: Path, config: dict[str, str] | None) -> None:
    assert validate(stored(tmp_path), config)["ckptsync_level"] == "digest"


def test_a_checkpoint_that_ray_keeps_itself_is_looked_at_where_it_is() -> None:
    told = validate(Checkpoint(str(vector("hf-zero3-2node").sources[0])), level="stat")
    assert told["ckptsync_level"] == "stat"


def test_a_level_that_there_is_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="level 'deep': one of stat, digest"):
        validate(Checkpoint(str(tmp_path)), level="deep")


def test_of_several_locations_the_worst_is_told() -> None:
    well = Report("sft", NAME, NAME, 0, "digest", "ok", (), "", 5, ())
    reports = [
        well,
        replace(well, verdict="damaged", findings=(Finding("digest", "state", "other bytes"),)),
        replace(well, verdict="arriving"),
    ]
    told = ray_validate._metrics("sft", reports)
    assert (told["ckptsync_verdict"], told["ckptsync_read"], told["ckptsync_findings"]) == (
        "damaged",
        15,
        ["digest: state: other bytes"],
    )
