"""What says that files are not of one finished save: other files, copies of tensors, times."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from ckptsync.cli.main import main
from ckptsync.errors import ConfigError, Corrupt, Incomplete
from ckptsync.layouts import zero
from ckptsync.merger.file_times import check_times
from ckptsync.merger.plan import MergeOptions
from ckptsync.walk import SAME_MOMENT, SLOW
from tests.support.merge_on_disk import merge_local, prepare_local
from tests.support.vector import vector

KEEP = MergeOptions("keep")
HOUR = 3600


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A distributed checkpoint of three ranks, every file of one second."""
    place = tmp_path / "step-2"
    shutil.copytree(vector("titan").sources[0], place)
    for path in place.iterdir():
        os.utime(path, (1e9, 1e9))
    return place


def test_two_nodes_with_metadata_of_two_saves_hold_two_saves(saved: Path, tmp_path: Path) -> None:
    other = shutil.copytree(saved, tmp_path / "other")
    merge_local([saved, other], tmp_path / "same", KEEP)
    data = bytearray((other / ".metadata").read_bytes())
    at = data.index(b"save_id") + 12  # a letter of the id that torch gives each save
    data[at : at + 1] = b"a" if data[at : at + 1] != b"a" else b"b"
    (other / ".metadata").write_bytes(bytes(data))
    with pytest.raises(Corrupt, match=r"^\.metadata: differs between the directories"):
        merge_local([saved, other], tmp_path / "out", KEEP)


def test_a_save_that_has_not_ended_over_another_is_seen(saved: Path, tmp_path: Path) -> None:
    (saved / ".metadata.tmp").touch()
    with pytest.raises(Incomplete, match="a newer save overwrites this checkpoint"):
        merge_local([saved], tmp_path / "out", KEEP)


def test_times_that_were_lost_in_copying_can_be_ignored(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.utime(saved / "__1_0.distcp", (2e9, 2e9))
    assert main(["merge", str(saved), str(tmp_path / "out")]) == 3
    assert main(["inspect", str(saved)]) == 3
    assert "incomplete: __1_0.distcp: written" in capsys.readouterr().out
    prepare_local([saved], tmp_path / "out", KEEP, use_times=False)
    assert main(["merge", str(saved), str(tmp_path / "out"), "--ignore-times"]) == 0


def test_in_a_store_times_say_when_files_arrived_and_are_not_asked(
    saved: Path, tmp_path: Path
) -> None:
    os.utime(saved / "__1_0.distcp", (2e9, 2e9))
    (tmp_path / ".ckptsync").mkdir()
    (tmp_path / ".ckptsync" / "store.json").write_text("{}")
    merge_local([saved], tmp_path / "out", KEEP)


def test_of_ranks_that_know_of_no_other_each_ends_its_own_save(tmp_path: Path) -> None:
    place = shutil.copytree(vector("dcp-local").sources[0], tmp_path / "x")
    for path in place.iterdir():
        os.utime(path, (1e9, 1e9))
    os.utime(place / "__2_0.distcp", (1e9 + 600, 1e9 + 600))
    with pytest.raises(Incomplete, match=r"__2_0\.distcp: written 10 minutes after __2\.metadata"):
        merge_local([place], tmp_path / "out", KEEP)


def test_directories_of_two_steps_are_never_one_checkpoint(saved: Path, tmp_path: Path) -> None:
    other = shutil.copytree(saved, tmp_path / "node1" / "step-3")
    with pytest.raises(ConfigError, match=r"step-2 and .*step-3: two steps of a training"):
        merge_local([saved, other], tmp_path / "out", KEEP)
    merge_local([saved, other.rename(other.parent / "step-02")], tmp_path / "out", KEEP)


def test_directories_that_were_written_hours_apart_are_asked_about(
    saved: Path, tmp_path: Path
) -> None:
    other = tmp_path / "node1"
    other.mkdir()
    moved = (saved / "__1_0.distcp").rename(other / "__1_0.distcp")
    for hours, is_told in ((0, False), (3, True)):
        os.utime(moved, (1e9 + 3600 * hours, 1e9 + 3600 * hours))
        notes = merge_local([saved, other], tmp_path / str(hours), KEEP).notes
        assert any("3 hours after" in note and "of one save?" in note for note in notes) == is_told


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """The Trainer's whole model above DeepSpeed's shards, every file of one second."""
    place = tmp_path / "checkpoint-4"
    shutil.copytree(vector("hf-zero2").sources[0], place)
    for path in place.rglob("*"):
        os.utime(path, (1e9, 1e9))
    return place


def other_values(path: Path, *, of: int) -> None:
    """Change the last bytes of a safetensors file: weights that training has taken elsewhere."""
    data = bytearray(path.read_bytes())
    data[-of:] = bytes(byte ^ 1 for byte in data[-of:])
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("source", [[], ["--source", "zero", "--dtype", "keep"]])
def test_a_whole_model_of_another_run_than_the_shards_below_it_is_refused(
    trained: Path, source: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["merge", str(trained), str(tmp_path / "same"), *source]) == 0
    other_values(trained / "model.safetensors", of=400)
    assert main(["merge", str(trained), str(tmp_path / "out"), *source]) == 10
    told = capsys.readouterr().err
    assert ": values of" in told
    assert all(name in told for name in ("model.safetensors", "optim_states.pt"))
    assert not (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("source", [None, "zero"])
def test_a_model_whose_weights_are_not_the_masters_rounded_is_not_compared(
    trained: Path, source: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_values(trained / "model.safetensors", of=400)
    monkeypatch.setattr(zero, "why_unlike", lambda _: "trained with zenflow")
    merge_local([trained], tmp_path / "out", MergeOptions("keep", source=source))


def test_an_adapter_of_another_run_than_the_shards_below_it_is_refused(tmp_path: Path) -> None:
    place = shutil.copytree(vector("hf-zero3-lora").sources[0], tmp_path / "checkpoint-4")
    merge_local([place], tmp_path / "same", KEEP)
    other_values(place / "adapter_model.safetensors", of=40)
    with pytest.raises(
        Corrupt, match=r"values of .*lora_.* differ from those in (adapter_model|global_step4/zero)"
    ):
        merge_local([place], tmp_path / "out", KEEP)


def test_a_whole_model_of_a_later_step_is_not_compared(trained: Path, tmp_path: Path) -> None:
    other_values(trained / "model.safetensors", of=400)
    state = trained / "trainer_state.json"
    state.write_text(state.read_text().replace('"global_step": 4', '"global_step": 5'))
    merge_local([trained], tmp_path / "out", KEEP)


def test_shards_that_cannot_be_read_leave_the_whole_model_as_it_is_and_it_is_said(
    trained: Path, tmp_path: Path
) -> None:
    (trained / "global_step4" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").write_bytes(
        b"PK\x03\x04 and no more"
    )
    found = merge_local([trained], tmp_path / "out", KEEP)
    assert any("not compared with zero:global_step4" in note for note in found.notes)


def test_shards_beside_a_model_with_a_damaged_index_are_offered_and_merged(
    trained: Path, tmp_path: Path
) -> None:
    (trained / "model.safetensors.index.json").write_text('{"weight_map": ')
    with pytest.raises(Corrupt, match="not an index") as damaged:
        merge_local([trained], tmp_path / "out", KEEP)
    assert "--source zero:global_step4" in damaged.value.hint
    found = merge_local([trained], tmp_path / "out", MergeOptions("keep", source="zero"))
    assert any("not compared with whole:." in note for note in found.notes)


# Times


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
    merge_local([source], tmp_path / "good", KEEP)
    os.utime(shards[0], (HOUR, HOUR))
    with pytest.raises(error, match="written 60 minutes after"):
        merge_local([source], tmp_path / "bad", KEEP)
    assert not (tmp_path / "bad").exists()


def test_an_optimizer_saved_before_the_shards_is_no_reason_but_a_shard_an_hour_apart_is() -> None:
    check({".metadata": 0, "a.safetensors": 600, "b.safetensors": 601})
    with pytest.raises(Corrupt):
        check({".metadata": 0, "a.safetensors": 600, "b.safetensors": 600 + HOUR})
