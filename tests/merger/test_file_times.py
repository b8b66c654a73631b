"""What the times of files tell of a save, and what they do not."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from ckptsync.errors import Corrupt, Incomplete
from ckptsync.merger.file_times import check_times
from ckptsync.merger.plan import MergeOptions
from ckptsync.walk import SAME_MOMENT, SLOW
from tests.support.merge_on_disk import merge_local
from tests.support.vector import vector

HOUR = 3600


def check(times: Mapping[str, float], size: int = 1000) -> None:
    reads = [name for name in times if not name.endswith(".metadata")]
    check_times(times, dict.fromkeys(times, size), reads)


@pytest.mark.parametrize(
    "times",
    [
        {"a.distcp": 0, "b.distcp": 60, ".metadata": 61},
        {"a.distcp": 0, "b.distcp": 0, ".metadata": 90 * HOUR},
        {".metadata": 0, "a.distcp": 0.1, "b.distcp": 1.2},
        {"m/a.distcp": 0, "m/.metadata": 1, "n/a.distcp": HOUR, "n/.metadata": HOUR},
        {"a": 0},
        {},
    ],
    ids=["saved", "touched", "copied", "two-folders", "alone", "nothing"],
)
def test_times_of_one_save_are_no_reason(times: Mapping[str, float]) -> None:
    check(times)


def test_a_shard_that_is_newer_than_its_metadata_is_of_a_save_that_is_not_finished() -> None:
    with pytest.raises(
        Incomplete, match=r"m/b\.distcp: written 60 minutes after m/\.metadata"
    ) as e:
        check({"m/a.distcp": 0, "m/.metadata": 1, "m/b.distcp": HOUR})
    assert "touch m/.metadata" in e.value.hint


def test_a_shard_that_could_not_be_copied_any_faster_is_none() -> None:
    times = {".metadata": 0.0, "a.distcp": 100.0, "b.distcp": 200.0}
    check(times, size=100 * SLOW)
    with pytest.raises(Incomplete):
        check(times, size=int((99 - SAME_MOMENT) * SLOW))


@pytest.mark.parametrize(("odd", "said"), [(-HOUR, "before"), (HOUR, "after")])
def test_a_shard_an_hour_apart_is_of_another_save(odd: float, said: str) -> None:
    with pytest.raises(Corrupt, match=rf"b: written 60 minutes {said} (a|c)"):
        check({"a": 0, "b": odd, "c": 1})


def test_model_and_optimizer_files_are_of_one_save_though_not_all_are_read() -> None:
    times = {
        "t/mp_rank_00_model_states.pt": HOUR,
        "t/r_optim_states.pt": 0.0,
        "t/latest": 9 * HOUR,
        "non_model_tensors.pt": 0.0,
        "rng.pt": 0.0,
    }
    sizes = dict.fromkeys(times, 1)
    check_times(times, sizes, ["rng.pt"])
    with pytest.raises(
        Corrupt,
        match=r"t/r_optim_states\.pt: written 60 minutes before t/mp_rank_00_model_states\.pt",
    ):
        check_times(times, sizes, ["t/mp_rank_00_model_states.pt"])


def test_universal_parameters_convert_together_and_the_model_file_keeps_its_time() -> None:
    times = {
        "u/zero/a.weight/fp32.pt": HOUR,
        "u/zero/b.weight/fp32.pt": HOUR,
        "u/mp_rank_00_model_states.pt": 0.0,
    }
    check(times)
    with pytest.raises(Corrupt, match=r"u/zero/b\.weight/fp32\.pt: written 60 minutes after"):
        check({**times, "u/zero/c.weight/fp32.pt": HOUR, "u/zero/b.weight/fp32.pt": 2 * HOUR})


def test_of_large_shards_the_wait_may_be_longer() -> None:
    check({"a": 0, "b": HOUR}, size=HOUR * SLOW)


@pytest.mark.parametrize(
    ("name", "error"),
    [("dcp-mesh", Incomplete), ("raw-ds-zero3-odd", Corrupt), ("raw-ds-zero2-odd", Corrupt)],
)
def test_a_merge_asks_for_the_times(name: str, error: type[Exception], tmp_path: Path) -> None:
    source = shutil.copytree(vector(name).sources[0], tmp_path / "source")
    shards = sorted(p for p in source.rglob("*") if p.suffix in (".distcp", ".pt"))
    for path in source.rglob("*"):
        os.utime(path, (0, 0))
    merge_local([source], tmp_path / "good", MergeOptions("keep"))
    os.utime(shards[0], (HOUR, HOUR))
    with pytest.raises(error, match="written 60 minutes after"):
        merge_local([source], tmp_path / "bad", MergeOptions("keep"))
    assert not (tmp_path / "bad").exists()


def test_an_optimizer_saved_before_the_shards_is_no_reason_but_a_shard_an_hour_apart_is() -> None:
    check({".metadata": 0, "a.safetensors": 600, "b.safetensors": 601})
    with pytest.raises(Corrupt):
        check({".metadata": 0, "a.safetensors": 600, "b.safetensors": 600 + HOUR})
