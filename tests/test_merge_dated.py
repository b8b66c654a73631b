"""What the times of files tell of a save, and what they do not."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from ckptsync.errors import Corrupt, Incomplete
from ckptsync.merge.dated import AT_ONCE, SLOW, Dated, check_dates
from ckptsync.merge.local import merge_local
from ckptsync.merge.plan import Options
from tests.vector import vector

HOUR = 3600


def check(times: Mapping[str, float], size: int = 1000, layout: str = "dcp") -> None:
    files = {name: Dated(size, at) for name, at in times.items()}
    check_dates(layout, files, [name for name in times if not name.endswith(".metadata")])


@pytest.mark.parametrize(
    "times",
    [
        {"a": 0, "b": 60, ".metadata": 61},
        {"a": 0, "b": 0, ".metadata": 90 * HOUR},
        {".metadata": 0, "a": 0.1, "b": 1.2},
        {"m/a": 0, "m/.metadata": 1, "n/a": HOUR, "n/.metadata": HOUR},
        {"a": 0},
        {},
    ],
    ids=["saved", "touched", "copied", "two-folders", "alone", "nothing"],
)
def test_times_of_one_save_are_no_reason(times: Mapping[str, float]) -> None:
    check(times)


def test_a_shard_that_is_newer_than_its_metadata_is_of_a_save_that_is_not_finished() -> None:
    with pytest.raises(Incomplete, match=r"m/b: written 60 minutes after m/\.metadata") as e:
        check({"m/a": 0, "m/.metadata": 1, "m/b": HOUR})
    assert "touch m/.metadata" in e.value.hint


def test_a_shard_that_could_not_be_copied_any_faster_is_none() -> None:
    times = {".metadata": 0.0, "a": 100.0, "b": 200.0}
    check(times, size=100 * SLOW)
    with pytest.raises(Incomplete):
        check(times, size=int((99 - AT_ONCE) * SLOW))


@pytest.mark.parametrize(("odd", "said"), [(-HOUR, "before"), (HOUR, "after")])
def test_a_shard_an_hour_apart_is_of_another_save(odd: float, said: str) -> None:
    with pytest.raises(Corrupt, match=rf"b: written 60 minutes {said} (a|c)"):
        check({"a": 0, "b": odd, "c": 1}, layout="zero")


def test_what_stands_beside_a_shard_is_of_its_save_though_it_is_not_read() -> None:
    files = {
        name: Dated(1, at) for name, at in {"t/model.pt": HOUR, "t/optim.pt": 0.0, "t/latest": 9 * HOUR, "rng.pt": 0.0}.items()
    }
    check_dates("zero", files, ["rng.pt"])
    with pytest.raises(Corrupt, match=r"t/optim\.pt: written 60 minutes before t/model\.pt"):
        check_dates("zero", files, ["t/model.pt"])


def test_of_large_shards_the_wait_may_be_longer() -> None:
    check({"a": 0, "b": HOUR}, size=HOUR * SLOW, layout="zero")


@pytest.mark.parametrize("layout", ["whole", "peft"])
def test_models_that_are_fetched_file_by_file_may_take_days(layout: str) -> None:
    check({"a": 0, "b": 99 * HOUR}, layout=layout)


@pytest.mark.parametrize(
    ("name", "error"), [("dcp-mesh", Incomplete), ("raw-ds-zero3-odd", Corrupt), ("raw-ds-zero2-odd", Corrupt)]
)
def test_a_merge_asks_for_the_times(name: str, error: type[Exception], tmp_path: Path) -> None:
    source = shutil.copytree(vector(name).sources[0], tmp_path / "source")
    shards = sorted(p for p in source.rglob("*") if p.suffix in (".distcp", ".pt"))
    for path in source.rglob("*"):
        os.utime(path, (0, 0))
    merge_local([source], tmp_path / "good", Options("keep"))
    os.utime(shards[0], (HOUR, HOUR))
    with pytest.raises(error, match="written 60 minutes after"):
        merge_local([source], tmp_path / "bad", Options("keep"))
    assert not (tmp_path / "bad").exists()


def test_an_optimizer_saved_before_the_shards_beside_it_is_no_reason_but_a_shard_an_hour_apart_is() -> None:
    check({".metadata": 0, "a": 600, "b": 601}, layout="dcp_safetensors")
    with pytest.raises(Corrupt):
        check({".metadata": 0, "a": 600, "b": 600 + HOUR}, layout="dcp_safetensors")
