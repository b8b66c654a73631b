"""What is read of a checkpoint from real files, from the hook's markers, and from what lies around
it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ckptsync.checkpoint_dirs import CheckpointDir, Family, find_checkpoint_dirs
from ckptsync.checkpoint_dirs import list_checkpoint as scanned
from ckptsync.errors import Incomplete
from ckptsync.spool.markers import (
    Commit,
    PinNotes,
    RankMark,
    TrainingProcess,
    process_path,
    save_folder,
    write_mark,
)
from ckptsync.spool.pins import Pin, create_pin
from ckptsync.walk import Stat
from ckptsync.worker import observation
from ckptsync.worker.local_save import LocalFile, LocalFiles, LocalSave, build_local_save
from ckptsync.worker.observation import (
    HookStatus,
    Observation,
    Span,
    Surroundings,
    TrainerState,
    find_surroundings,
    fingerprint,
    hook_status,
    is_later,
    observe,
    trainer_state,
    with_surroundings,
)
from tests.support.vector import vector


def list_local_files(path: Path) -> tuple[LocalFiles, CheckpointDir]:
    (checkpoint_dir,) = find_checkpoint_dirs(path)
    return build_local_save("run", checkpoint_dir, scanned(checkpoint_dir)).files, checkpoint_dir


def gather(files: LocalFiles, checkpoint_dir: CheckpointDir, pin: Pin | None = None) -> Observation:
    return observe(LocalSave("run", checkpoint_dir, files, pin), Surroundings())


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A node's real output directory, with the checkpoint as the trainer left it."""
    shutil.copytree(
        vector("hf-fsdp2-2node").sources[0].parent, tmp_path / "out", copy_function=shutil.copyfile
    )
    (tmp_path / "out" / "checkpoint-4" / "trainer_state.json").touch()
    return tmp_path / "out"


def test_a_file_open_for_writing_is_seen_and_one_open_for_reading_is_not(out: Path) -> None:
    with (
        (out / "checkpoint-4" / "scheduler.pt").open("rb"),
        (out / "checkpoint-4" / "rng_state_0.pth").open("ab"),
    ):
        assert gather(*list_local_files(out)).writing == ("rng_state_0.pth",)
    assert gather(*list_local_files(out)).writing == ()


def test_without_leases_nobody_knows_who_writes(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observation, "_LEASE_FILE_SYSTEMS", frozenset())
    with (out / "checkpoint-4" / "rng_state_0.pth").open("ab"):
        assert gather(*list_local_files(out)).writing is None


@pytest.mark.parametrize("name", ["scheduler.pt", "rng_state_1.pth", "trainer_state.json"])
def test_a_torn_file_is_not_closed(out: Path, name: str) -> None:
    torn = out / "checkpoint-4" / name
    torn.write_bytes(torn.read_bytes()[:-9])
    assert gather(*list_local_files(out)).unclosed == (name,)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '"x"', '{"global_step": "4"}', "[" * 10**5, "\xff"]
)
def test_a_trainer_state_that_says_nothing_is_one_without_a_step(out: Path, text: str) -> None:
    (out / "checkpoint-4" / "trainer_state.json").write_bytes(text.encode("latin-1"))
    state = trainer_state(list_local_files(out)[0])
    assert state is not None
    assert state.step is None


def test_files_that_vanish_meanwhile_are_incomplete(out: Path) -> None:
    local_files = list_local_files(out)
    shutil.rmtree(out / "checkpoint-4")
    with pytest.raises(Incomplete):
        gather(*local_files)


def test_a_name_that_goes_after_the_last_file_was_written_shows(out: Path) -> None:
    newest = max(f.mtime for f in list_local_files(out)[0].stats)
    for path in (out / "checkpoint-4", *(out / "checkpoint-4").rglob("*")):
        if path.is_dir():
            os.utime(path, ns=(newest, newest))
    assert not gather(*list_local_files(out)).was_emptied
    (out / "checkpoint-4" / "latest").symlink_to("latest")  # a link to itself is no directory
    os.utime(out / "checkpoint-4", ns=(newest, newest))
    assert not gather(*list_local_files(out)).was_emptied
    (out / "checkpoint-4" / "optimizer_0" / "__0_0.distcp").unlink()
    os.utime(out / "checkpoint-4" / "optimizer_0", ns=(newest, newest + 2 * S))
    assert gather(*list_local_files(out)).was_emptied


def test_what_was_at_rest_before_is_known_by_the_fingerprint_beside_its_pin(out: Path) -> None:
    files, checkpoint_dir = list_local_files(out)
    pin = create_pin(out, checkpoint_dir.name, 0, "n0")
    assert pin is not None
    stable = fingerprint(files.stats)
    assert gather(files, checkpoint_dir, replace(pin, notes=PinNotes(stable=stable))).stable
    assert not gather(files, checkpoint_dir, replace(pin, notes=PinNotes(stable=stable - 1))).stable
    assert not gather(files, checkpoint_dir, pin).stable


def test_a_fingerprint_holds_until_something_is_added_taken_or_written_again() -> None:
    files = [Stat(name, 1, n, n, 0) for n, name in enumerate("abc")]
    same = (reversed(files), [replace(f, inode=9, device=9) for f in files])
    others = (files[1:], [replace(f, size=2) for f in files], (), [*files, Stat("d", 1, 1, 1, 0)])
    assert {fingerprint(f) for f in same} == {fingerprint(files)}
    assert fingerprint(files) not in {fingerprint(f) for f in others}


def test_what_lies_around_it_is_looked_at_again_and_its_files_are_not(out: Path) -> None:
    files, checkpoint_dir = list_local_files(out)
    first = gather(files, checkpoint_dir)
    shutil.rmtree(checkpoint_dir.path)
    local_save = LocalSave("run", checkpoint_dir, replace(files, is_gone=True), None)
    later = (checkpoint_dir.family, 5, max(f.mtime for f in files.stats))
    again = with_surroundings(
        first, local_save, Surroundings(spans=[later], has_trainer=True), other_part=True
    )
    assert again == replace(first, later=True, other_part=True, has_trainer=True, is_gone=True)


@pytest.mark.parametrize(
    ("text", "step"),
    [(b"7", 7), (b"12\n", 12), (b"", None), (b"-1", None), (b"7 or so", None), (b"\xb2", None)],
)
def test_the_step_of_verl_s_driver_is_read(tmp_path: Path, text: bytes, step: int | None) -> None:
    (tmp_path / "global_step_7" / "actor").mkdir(parents=True)
    hold_, checkpoint_dir = list_local_files(tmp_path)
    assert gather(hold_, checkpoint_dir).marker is None
    (tmp_path / "latest_checkpointed_iteration.txt").write_bytes(text)
    marker = gather(hold_, checkpoint_dir).marker
    mtime = (tmp_path / "latest_checkpointed_iteration.txt").stat().st_mtime_ns
    assert marker == TrainerState(step, mtime)


S = 10**9
BEGUN = TrainingProcess("t", 0, 2, 2, "h", 1, "1", "b", 100.0)
TRAINER = replace(BEGUN, trainer="transformers 5.23.0")
MARK = RankMark("t", "s0", "checkpoint-4", 4, 0, 2, 2, "h", 1, 130.0)
BOTH = (MARK, replace(MARK, rank=1, at=131.0))
PIN = Pin(
    "checkpoint-4",
    0,
    "",
    0,
    Path("pin"),
    (Stat("a", 3, 110 * S, 1, 1), Stat("b", 4, 120 * S, 2, 1)),
)


def status(
    pin: Pin | None,
    name: str,
    begun: tuple[TrainingProcess, ...] = (),
    marks: dict[str, tuple[RankMark, ...]] | None = None,
    *,
    alive: bool | None = False,
) -> HookStatus:
    around = Surroundings(processes=begun, marks=marks or {})
    files = pin.files if pin else ()
    return hook_status(
        around,
        name,
        files,
        is_committed=pin is not None and pin.is_committed,
        is_running=lambda _: alive,
    )


def said(
    *marks: RankMark,
    begun: TrainingProcess = BEGUN,
    pin: Pin | None = PIN,
    name: str = "checkpoint-4",
    alive: bool | None = True,
) -> str:
    return status(pin, name, (begun,), {"checkpoint-4": marks}, alive=alive)


def test_where_no_hook_ever_was_nothing_is_said(tmp_path: Path) -> None:
    assert find_surroundings(tmp_path, (), ("checkpoint-4",)) == Surroundings(spans=[])
    assert status(PIN, "checkpoint-4", alive=True) == ""
    assert said(pin=None) == ""


def test_what_lies_in_the_spool_is_read_for_the_checkpoints_asked_for(tmp_path: Path) -> None:
    spool = tmp_path / "_ckptsync"
    write_mark(process_path(spool, "p"), BEGUN)
    for mark in (*BOTH, replace(MARK, checkpoint="checkpoint-8")):
        write_mark(save_folder(spool, mark.checkpoint, mark.save) / f"rank-{mark.rank}.json", mark)
    surroundings = find_surroundings(tmp_path, (), ("checkpoint-4",))
    assert (surroundings.processes, surroundings.marks) == (
        (replace(BEGUN, process="p"),),
        {"checkpoint-4": BOTH},
    )


def test_a_commit_counts_as_long_as_the_files_are_what_it_says() -> None:
    files = {"a": (3, 110 * S), "b": (4, 120 * S)}
    commit = Commit("t", "s0", "checkpoint-4", 4, 2, (0, 1), "h", "", 131.0, files)
    assert said(pin=replace(PIN, commit=commit)) == "committed"
    # somebody deleted one
    assert said(pin=replace(PIN, commit=commit, files=PIN.files[:1])) == "training"
    written_again = (PIN.files[0], replace(PIN.files[1], mtime=125 * S))
    assert said(pin=replace(PIN, commit=commit, files=written_again)) == "training"


def test_a_living_training_has_in_hand_what_was_written_since_it_began() -> None:
    assert said() == "training"
    assert said(alive=None) == "training"
    assert said(alive=False) == ""
    assert said(begun=replace(BEGUN, at=120.5)) == ""  # a save of the training before it
    assert said(begun=replace(BEGUN, ended=140.0)) == ""
    assert said(begun=replace(BEGUN, marks="some")) == ""  # it may never mark this one


def test_marks_of_all_ranks_that_write_here_are_needed() -> None:
    assert said(MARK) == "training"
    assert said(*BOTH) == "marked"
    assert said(*BOTH, alive=False) == "marked"
    assert said(MARK, replace(MARK, at=131.0)) == "training"  # one rank twice
    assert said(replace(MARK, local_world=0)) == "training"  # nobody knew how many there are
    assert said(replace(MARK, local_world=0), BOTH[1]) == "marked"


def test_marks_of_an_older_save_say_nothing_of_one_that_is_being_written() -> None:
    again = replace(PIN, files=(*PIN.files, Stat("c", 1, 140 * S, 3, 1)))
    assert said(*BOTH, pin=again) == "training"
    assert said(*BOTH, replace(MARK, save="s1", at=150.0), pin=again) == "training"
    assert said(*BOTH, *(replace(m, save="s1", at=m.at + 20) for m in BOTH), pin=again) == "marked"


@pytest.mark.parametrize("alive", [True, False])
@pytest.mark.parametrize("left", [0.0, 140.0])
def test_the_final_model_is_there_when_processes_have_left(*, alive: bool, left: float) -> None:
    expected = "training" if alive else "marked" if left else "killed"
    process = replace(TRAINER, ended=105.0, left=left)
    assert said(begun=process, name="final", alive=alive) == expected
    # it was there before
    assert said(begun=replace(BEGUN, at=125.0, left=left), name="final", alive=alive) == ""


def test_of_a_restarted_training_the_last_processes_tell_of_the_final_model() -> None:
    assert said(begun=BEGUN, name="final", alive=False) == ""  # of a script with `mark_saved`
    again = [
        replace(TRAINER, train="t2", rank=rank, at=105.0 + rank, left=140.0) for rank in (0, 1)
    ]
    assert status(PIN, "final", (BEGUN, *again)) == "marked"
    assert status(PIN, "final", (BEGUN, again[0], replace(again[1], left=0.0))) == "killed"


def spans_of(saves: list[LocalSave]) -> Sequence[Span]:
    return find_surroundings(Path("nowhere"), saves, ()).spans


def make_save(name: str, *mtimes: int, family: Family = "trainer") -> LocalSave:
    held = {
        str(n): LocalFile(Stat(str(n), 1, at, n, 0), Path(), is_pinned=False)
        for n, at in enumerate(mtimes)
    }
    return LocalSave(
        "run", CheckpointDir(name, family, Path(name)), LocalFiles(name, family, held), None
    )


def test_a_higher_number_that_was_begun_afterwards_is_later() -> None:
    one, two = make_save("checkpoint-1", 10, 20), make_save("checkpoint-2", 20, 30)
    over = make_save("checkpoint-3", 15, 30)
    assert is_later(one, spans_of([one, two]))
    assert not is_later(one, spans_of([one, over]))
    assert not is_later(two, spans_of([one, two]))


def test_another_kind_no_step_and_no_files_say_nothing() -> None:
    local_save = make_save("checkpoint-1", 10)
    assert spans_of([make_save("checkpoint-2"), make_save("final", 30)]) == []
    assert not is_later(local_save, spans_of([make_save("checkpoint_2", 30, family="accelerate")]))
    assert not is_later(make_save("final", 1), spans_of([local_save]))
