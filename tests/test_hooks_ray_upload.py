from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ckptsync.catalogue.fresh import fresh
from ckptsync.errors import ConfigError, Incomplete
from ckptsync.hooks.ray import upload_fn
from ckptsync.hooks.ray_bring import bring
from ckptsync.hooks.ray_note import Note
from ckptsync.hooks.ray_upload import Part, send
from ckptsync.records.state import Snapshot
from ckptsync.stores.opening import create_store, open_store

NAME = "checkpoint_2026-11-21_20-00-00.123456"


def local(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def sent(tmp_path: Path, *parts: Path) -> Note:
    notes = {send(part, str(tmp_path / "store"), Part("sft", NAME, rank, 30)) for rank, part in enumerate(parts)}
    (note,) = notes
    assert note is not None
    return note


def stored(tmp_path: Path) -> Snapshot:
    (found,) = fresh(open_store(str(tmp_path / "store")), "sft").readable
    return found


def sent_by(tmp_path: Path, life: str, ranks: int) -> list[Note | None]:
    """What the ranks of one worker group report as ``NAME``; each life of the training comes to other numbers."""
    parts = [local(tmp_path / f"{life}-{rank}", **{f"shard{rank}": f"{life} {rank}", "common": life}) for rank in range(ranks)]
    return [send(part, str(tmp_path / "store"), Part("sft", NAME, rank, 5, attempt=life)) for rank, part in enumerate(parts)]


def content(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.iterdir())}


def test_each_ranks_part_is_in_the_store_as_one_save_and_comes_back_whole(tmp_path: Path) -> None:
    note = sent(tmp_path, local(tmp_path / "tmp0", zero="0", common="c"), local(tmp_path / "tmp1", one="1", common="c"))
    manifests = [known.manifest for known in stored(tmp_path).manifests]
    assert len(manifests) == 2
    assert {m.save for m in manifests} != {""}
    assert len({m.save for m in manifests}) == 1
    assert {m.node.rpartition(".")[2] for m in manifests} == {"rank-0", "rank-1"}
    (tmp_path / "back").mkdir()
    assert content(bring(note, tmp_path / "back")) == {"zero": "0", "one": "1", "common": "c"}


def test_nothing_is_written_into_what_ray_gave(tmp_path: Path) -> None:
    part = local(tmp_path / "tmp0", zero="0")
    before = part.stat().st_mtime_ns
    sent(tmp_path, part)
    assert (content(part), part.stat().st_mtime_ns) == ({"zero": "0"}, before)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store", "tmp0"]


def test_ranks_that_send_the_same_files_at_once_wait_for_each_other(tmp_path: Path) -> None:
    parts = [local(tmp_path / f"tmp{rank}", model="m" * 100_000, **{f"rank{rank}": str(rank)}) for rank in range(4)]
    notes: list[Note | None] = []
    ranks = [
        threading.Thread(
            target=lambda part=part, rank=rank: notes.append(send(part, str(tmp_path / "store"), Part("sft", NAME, rank, 60)))
        )
        for rank, part in enumerate(parts)
    ]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    assert len(notes) == 4
    assert len(stored(tmp_path).manifests) == 4
    assert set(content(tmp_path / "store" / "sft" / NAME)) == {"model", "rank0", "rank1", "rank2", "rank3"}


def test_other_bytes_under_one_name_are_both_kept(tmp_path: Path) -> None:
    sent(tmp_path, local(tmp_path / "tmp0", state="0"), local(tmp_path / "tmp1", state="1"))
    kept = {path.read_text() for path in (tmp_path / "store").rglob("state")}
    assert kept == {"0", "1"}


@pytest.mark.parametrize("left", [1, 3], ids=["not all ranks had reported", "more ranks had reported"])
def test_a_step_that_is_reported_again_after_a_crash_is_what_was_reported_last(tmp_path: Path, left: int) -> None:
    before = sent_by(tmp_path, "first", left)
    first, second = sent_by(tmp_path, "second", 2)
    assert first is not None
    assert first == second
    assert first not in before
    (tmp_path / "back").mkdir()
    assert content(bring(first, tmp_path / "back")) == {"common": "second", "shard0": "second 0", "shard1": "second 1"}


def test_a_newer_save_of_the_same_name_is_not_given_for_the_one_that_was_reported(tmp_path: Path) -> None:
    reported, _ = sent_by(tmp_path, "first", 2)
    sent_by(tmp_path, "second", 1)
    assert reported is not None
    (tmp_path / "back").mkdir()
    assert content(bring(reported, tmp_path / "back"))["common"] == "first"


def test_two_reports_under_one_name_are_refused_and_the_first_stays_whole(tmp_path: Path) -> None:
    (note,) = sent_by(tmp_path, "first", 1)
    with pytest.raises(ConfigError, match="reported before, with other files"):
        send(local(tmp_path / "again", shard0="other"), str(tmp_path / "store"), Part("sft", NAME, 0, 5, attempt="first"))
    assert note is not None
    assert send(tmp_path / "first-0", str(tmp_path / "store"), Part("sft", NAME, 0, 5, attempt="first")) == note
    (tmp_path / "back").mkdir()
    assert content(bring(note, tmp_path / "back"))["shard0"] == "first 0"


def test_a_rank_that_has_written_nothing_holds_nobody_up(tmp_path: Path) -> None:
    (tmp_path / "tmp1").mkdir()
    assert send(tmp_path / "tmp1", str(tmp_path / "store"), Part("sft", NAME, 1)) is None


def test_a_directory_that_was_deleted_before_it_was_sent_is_no_empty_one(tmp_path: Path) -> None:
    with pytest.raises(Incomplete, match="gone before it was sent") as told:
        send(tmp_path / "tmp0", str(tmp_path / "store"), Part("sft", NAME, 0))
    assert "ASYNC" in told.value.hint


def test_what_is_not_sent_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    part = local(tmp_path / "tmp0", zero="0", **{"one.part": "1"})
    (part / "weights").symlink_to(tmp_path)
    sent(tmp_path, part)
    assert "one.part is not sent" in caplog.text
    assert "links or special files are not sent: weights" in caplog.text
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "weights").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="weights is a link"):
        send(tmp_path / "links", str(tmp_path / "store"), Part("sft", NAME, 1))


@pytest.mark.parametrize("name", ["epoch=1", "final", "checkpoints", "a/b", ".hidden"])
def test_a_name_that_no_store_could_keep_is_refused_before_anything_is_made(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="no name that a store") as told:
        send(local(tmp_path / "tmp0", zero="0"), str(tmp_path / "store"), Part("sft", name, 0))
    assert "checkpoint_dir_name" in told.value.hint
    assert not (tmp_path / "store").exists()


def test_a_relative_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="store: a relative path"):
        send(local(tmp_path / "tmp0", zero="0"), "store", Part("sft", NAME, 0))
    assert send(tmp_path / "tmp0", f"{tmp_path}/store/", Part("sft", NAME, 0)) is not None


def test_what_is_finished_a_little_later_is_waited_for(tmp_path: Path) -> None:
    half = local(tmp_path / "tmp0")
    (half / "model.safetensors").write_bytes((2).to_bytes(8, "little"))
    later = threading.Timer(0.3, lambda: (half / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}"))
    later.start()
    note = send(half, str(tmp_path / "store"), Part("sft", NAME, 0, patience=30))
    assert note is not None
    assert (tmp_path / "store" / "sft" / note.location / "model.safetensors").stat().st_size == 10


def test_another_ranks_writing_is_not_waited_for(tmp_path: Path) -> None:
    store = tmp_path / "store"
    create_store(str(store))
    (store / "sft" / NAME).mkdir(parents=True)
    (store / "sft" / NAME / "zero").write_text("not yet in a manifest")
    (said := store / "sft" / ".ckptsync" / NAME / "sending" / "other.rank-9").parent.mkdir(parents=True)
    said.write_text("sending\n")
    note = send(local(tmp_path / "tmp0", zero="0"), str(store), Part("sft", NAME, 0, patience=0))
    assert note is not None
    assert [path.read_text() for path in (store / "sft" / ".ckptsync" / note.location / "files").rglob("zero")] == ["0"]


def test_what_is_never_finished_is_refused(tmp_path: Path) -> None:
    half = local(tmp_path / "tmp0")
    (half / "model.safetensors").write_bytes((100).to_bytes(8, "little") + b"{")
    with pytest.raises(Incomplete):
        send(half, str(tmp_path / "store"), Part("sft", NAME, 0, patience=0))
    assert fresh(open_store(str(tmp_path / "store")), "sft").readable == ()
    (half / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert send(half, str(tmp_path / "store"), Part("sft", NAME, 0, patience=0)) is not None  # reported again, it is no other one


def test_what_ray_is_given_can_be_handed_to_other_processes() -> None:
    import pickle

    given = upload_fn("/store", run="sft", patience=3)
    assert pickle.loads(pickle.dumps(given)) == given
