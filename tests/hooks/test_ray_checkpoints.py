from __future__ import annotations

import json
import os
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from ckptsync.catalogue.uncached import read_state
from ckptsync.errors import ConfigError, Corrupt, Incomplete, StoreError
from ckptsync.hooks import ray_checkpoints
from ckptsync.hooks.ray import as_directory, validate
from ckptsync.hooks.ray_checkpoints import Note, RankPart, download, send
from ckptsync.records.location_status import LocationState
from ckptsync.records.report import Report, VerifyFinding
from ckptsync.stores.opening import create_store, open_store
from tests.hooks.ray_stand_in import Checkpoint, Disk
from tests.support.vector import vector

NAME = "checkpoint_2026-11-21_20-00-00.123456"


def local(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def sent(tmp_path: Path, *parts: Path) -> Note:
    notes = {
        send(part, str(tmp_path / "store"), RankPart("sft", NAME, rank, 30))
        for rank, part in enumerate(parts)
    }
    (note,) = notes
    assert note is not None
    return note


def stored(tmp_path: Path) -> LocationState:
    (found,) = read_state(open_store(str(tmp_path / "store")), "sft").readable
    return found


def sent_by(tmp_path: Path, life: str, ranks: int) -> list[Note | None]:
    """What the ranks of one worker group report as ``NAME``.

    Each life of the training comes to other numbers.
    """
    parts = [
        local(tmp_path / f"{life}-{rank}", **{f"shard{rank}": f"{life} {rank}", "common": life})
        for rank in range(ranks)
    ]
    return [
        send(part, str(tmp_path / "store"), RankPart("sft", NAME, rank, 5, attempt=life))
        for rank, part in enumerate(parts)
    ]


def content(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.iterdir())}


def test_each_ranks_part_is_in_the_store_as_one_save_and_comes_back_whole(tmp_path: Path) -> None:
    note = sent(
        tmp_path,
        local(tmp_path / "tmp0", zero="0", common="c"),
        local(tmp_path / "tmp1", one="1", common="c"),
    )
    manifests = [stored_manifest.manifest for stored_manifest in stored(tmp_path).manifests]
    assert len(manifests) == 2
    assert {m.save for m in manifests} != {""}
    assert len({m.save for m in manifests}) == 1
    assert {m.node.rpartition(".")[2] for m in manifests} == {"rank-0", "rank-1"}
    (tmp_path / "back").mkdir()
    assert content(download(note, tmp_path / "back")) == {"zero": "0", "one": "1", "common": "c"}


@pytest.mark.parametrize(
    "left", [1, 3], ids=["not all ranks had reported", "more ranks had reported"]
)
def test_a_step_that_is_reported_again_is_what_was_reported_last(tmp_path: Path, left: int) -> None:
    before = sent_by(tmp_path, "first", left)
    first, second = sent_by(tmp_path, "second", 2)
    assert first is not None
    assert first == second
    assert first not in before
    (tmp_path / "back").mkdir()
    assert content(download(first, tmp_path / "back")) == {
        "common": "second",
        "shard0": "second 0",
        "shard1": "second 1",
    }


def test_a_newer_save_of_the_name_is_not_given_for_the_reported_one(tmp_path: Path) -> None:
    reported, _ = sent_by(tmp_path, "first", 2)
    sent_by(tmp_path, "second", 1)
    assert reported is not None
    (tmp_path / "back").mkdir()
    assert content(download(reported, tmp_path / "back"))["common"] == "first"


def test_two_reports_under_one_name_are_refused_and_the_first_stays_whole(tmp_path: Path) -> None:
    (note,) = sent_by(tmp_path, "first", 1)
    with pytest.raises(ConfigError, match="reported before, with other files"):
        send(
            local(tmp_path / "again", shard0="other"),
            str(tmp_path / "store"),
            RankPart("sft", NAME, 0, 5, attempt="first"),
        )
    assert note is not None
    assert (
        send(
            tmp_path / "first-0",
            str(tmp_path / "store"),
            RankPart("sft", NAME, 0, 5, attempt="first"),
        )
        == note
    )
    (tmp_path / "back").mkdir()
    assert content(download(note, tmp_path / "back"))["shard0"] == "first 0"


def test_a_rank_that_has_written_nothing_holds_nobody_up(tmp_path: Path) -> None:
    (tmp_path / "tmp1").mkdir()
    assert send(tmp_path / "tmp1", str(tmp_path / "store"), RankPart("sft", NAME, 1)) is None


def test_a_directory_that_was_deleted_before_it_was_sent_is_no_empty_one(tmp_path: Path) -> None:
    with pytest.raises(Incomplete, match="deleted before it was uploaded") as told:
        send(tmp_path / "tmp0", str(tmp_path / "store"), RankPart("sft", NAME, 0))
    assert "ASYNC" in told.value.hint


def test_what_is_not_sent_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    part = local(tmp_path / "tmp0", zero="0", **{"one.part": "1"})
    (part / "weights").symlink_to(tmp_path)
    sent(tmp_path, part)
    assert "one.part is not uploaded" in caplog.text
    assert "are not sent: weights" in caplog.text
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "weights").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="contains only links, such as weights"):
        send(tmp_path / "links", str(tmp_path / "store"), RankPart("sft", NAME, 1))


@pytest.mark.parametrize("name", ["epoch=1", "final", "checkpoints", "a/b", ".hidden"])
def test_a_name_that_no_store_could_keep_is_refused_at_once(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="not a valid checkpoint name") as told:
        send(local(tmp_path / "tmp0", zero="0"), str(tmp_path / "store"), RankPart("sft", name, 0))
    assert "checkpoint_dir_name" in told.value.hint
    assert not (tmp_path / "store").exists()


def test_a_relative_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="store: a relative path"):
        send(local(tmp_path / "tmp0", zero="0"), "store", RankPart("sft", NAME, 0))
    assert send(tmp_path / "tmp0", f"{tmp_path}/store/", RankPart("sft", NAME, 0)) is not None


def test_what_is_finished_a_little_later_is_waited_for(tmp_path: Path) -> None:
    half = local(tmp_path / "tmp0")
    (half / "model.safetensors").write_bytes((2).to_bytes(8, "little"))
    later = threading.Timer(
        0.3, lambda: (half / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    )
    later.start()
    note = send(half, str(tmp_path / "store"), RankPart("sft", NAME, 0, patience=30))
    assert note is not None
    assert (tmp_path / "store" / "sft" / note.location / "model.safetensors").stat().st_size == 10


def test_another_ranks_writing_is_not_waited_for(tmp_path: Path) -> None:
    store = tmp_path / "store"
    create_store(str(store))
    (store / "sft" / NAME).mkdir(parents=True)
    (store / "sft" / NAME / "zero").write_text("not yet in a manifest")
    (said := store / "sft" / ".ckptsync" / NAME / "sending" / "other.rank-9").parent.mkdir(
        parents=True
    )
    said.write_text("sending\n")
    note = send(
        local(tmp_path / "tmp0", zero="0"), str(store), RankPart("sft", NAME, 0, patience=0)
    )
    assert note is not None
    assert [
        path.read_text()
        for path in (store / "sft" / ".ckptsync" / note.location / "files").rglob("zero")
    ] == ["0"]


def test_what_is_never_finished_is_refused(tmp_path: Path) -> None:
    half = local(tmp_path / "tmp0")
    (half / "model.safetensors").write_bytes((100).to_bytes(8, "little") + b"{")
    with pytest.raises(Incomplete):
        send(half, str(tmp_path / "store"), RankPart("sft", NAME, 0, patience=0))
    assert read_state(open_store(str(tmp_path / "store")), "sft").readable == ()
    (half / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    # reported again, it is no other one
    assert send(half, str(tmp_path / "store"), RankPart("sft", NAME, 0, patience=0)) is not None


def sent_alone(tmp_path: Path, text: str = "0") -> Note:
    return sent(tmp_path, local(tmp_path / "tmp0", zero=text))


def in_store(tmp_path: Path, text: str = "0") -> Checkpoint:
    """What Ray keeps of a checkpoint that one rank has sent."""
    folder = str(tmp_path / "experiment" / NAME)
    ray_checkpoints.write_note(Disk(), folder, sent_alone(tmp_path, text))
    return Checkpoint(folder)


def test_rays_checkpoint_is_as_a_directory_what_was_sent(tmp_path: Path) -> None:
    with as_directory(in_store(tmp_path)) as brought:
        assert {path.name: path.read_text() for path in Path(brought).iterdir()} == {"zero": "0"}
    assert not Path(brought).exists()
    with as_directory(Checkpoint(str(tmp_path / "tmp0"))) as own:
        assert own == str(tmp_path / "tmp0")


@pytest.fixture
def reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    """A checkpoint in a store, and a node's own location for what is only for a while."""
    (tmp_path / "node").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "node"))
    return in_store(tmp_path)


def test_ranks_of_a_node_share_what_the_first_brought(tmp_path: Path, reported: Checkpoint) -> None:
    with as_directory(reported) as first:
        (tmp_path / "store" / "sft" / NAME / "zero").unlink()
        with as_directory(reported) as second:
            assert second == first
        assert (Path(first) / "zero").read_text() == "0"
    with pytest.raises(Incomplete), as_directory(reported):
        pass
    assert [path.name for path in (tmp_path / "node").glob("*/*")] == ["lock"]


def test_ranks_that_come_and_go_at_once_all_have_it(tmp_path: Path, reported: Checkpoint) -> None:
    seen = list[str]()

    def rank() -> None:
        for _ in range(20):
            with as_directory(reported) as brought:
                seen.append((Path(brought) / "zero").read_text())

    ranks = [threading.Thread(target=rank) for _ in range(4)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    assert seen == ["0"] * 80
    assert [path.name for path in (tmp_path / "node").glob("*/*")] == ["lock"]


def test_what_a_killed_rank_half_brought_is_brought_anew(
    tmp_path: Path, reported: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bring(note: Note, home: Path) -> Path:
        assert [*home.iterdir()] == [], "nothing calls it whole before it is"
        return download(note, home)

    monkeypatch.setattr(ray_checkpoints, "download", bring)
    with as_directory(reported) as brought:
        half = Path(brought).parent
    for left in (half, half.with_name(half.name[:-1])):
        (left / NAME).mkdir(parents=True)
        (left / NAME / "half").touch()
    with as_directory(reported) as brought:
        assert [path.name for path in Path(brought).iterdir()] == ["zero"]
        assert [path for path in half.parent.iterdir() if path.is_dir()] == [half]


@pytest.mark.skipif(os.getuid() != 0, reason="makes directories of another user")
def test_a_directory_of_another_user_is_refused(tmp_path: Path, reported: Checkpoint) -> None:
    home = tmp_path / "node" / f"ckptsync-ray-{os.getuid()}"
    home.mkdir(mode=0o700)
    os.chown(home, 65534, 65534)
    with pytest.raises(ConfigError, match="another user") as raised, as_directory(reported):
        pass
    assert "TMPDIR" in raised.value.hint
    os.chown(home, 0, 0)
    home.chmod(0o770)
    with pytest.raises(ConfigError, match="another user"), as_directory(reported):
        pass
    home.rmdir()
    home.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="another user"), as_directory(reported):
        pass


def test_what_is_damaged_in_the_store_is_not_given(tmp_path: Path) -> None:
    note = sent_alone(tmp_path, "0" * 100)
    (tmp_path / "store" / "sft" / NAME / "zero").write_text("1" * 100)
    with pytest.raises((Incomplete, Corrupt), match="zero"):
        download(note, tmp_path / "back")


def test_a_record_that_cannot_be_read_is_said_and_nothing_is_given(tmp_path: Path) -> None:
    note = sent_alone(tmp_path)
    (record,) = (tmp_path / "store" / "sft" / ".ckptsync" / NAME).glob("manifest-*")
    (record.parent / "report-0-0123456789abcdef.json").write_text("{}")
    (tmp_path / "back").mkdir()
    assert content(download(note, tmp_path / "back")) == {"zero": "0"}, (
        "a report keeps nothing back"
    )
    record.chmod(0o644)
    record.write_text("{}")
    with pytest.raises(Corrupt, match="manifest"):
        download(note, tmp_path / "back")


def test_what_the_store_has_let_go_is_not_there(tmp_path: Path) -> None:
    note = sent_alone(tmp_path)
    for record in (tmp_path / "store" / "sft" / ".ckptsync" / NAME).glob("manifest-*"):
        record.unlink()
    with pytest.raises(Incomplete, match=f"sft/{NAME}: no valid manifest of it"):
        download(note, tmp_path / "back")


def test_damage_is_a_metric_no_exception(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = in_store(tmp_path, "0" * 1000)
    (tmp_path / "store" / "sft" / NAME / "zero").write_bytes(b"0" * 999 + b"1")

    def refuse(*_: object) -> None:
        raise StoreError("this key may only upload")

    with monkeypatch.context() as patch:
        patch.setattr(ray_checkpoints, "write_report", refuse)
        assert validate(checkpoint)["ckptsync_verdict"] == "damaged"
    told = validate(checkpoint, level="digest")
    assert told["ckptsync_verdict"] == "damaged"
    assert "zero" in told["ckptsync_findings"][0]
    assert f"{tmp_path}/store/sft/{NAME}" in caplog.text
    (location_records,) = read_state(open_store(str(tmp_path / "store"))).locations
    assert location_records.status == "DAMAGED"  # it is recorded, so that a worker sends it again


@pytest.mark.parametrize("config", [None, {}, {"level": "digest"}])
def test_an_older_report_gives_a_configuration(
    tmp_path: Path, config: dict[str, str] | None
) -> None:
    assert validate(in_store(tmp_path), config)["ckptsync_level"] == "digest"


def test_a_checkpoint_that_ray_keeps_itself_is_looked_at_where_it_is() -> None:
    told = validate(Checkpoint(str(vector("hf-zero3-2node").sources[0])), level="stat")
    assert told["ckptsync_level"] == "stat"


def test_a_level_that_there_is_not_is_refused(tmp_path: Path) -> None:
    for level, why in (
        ("deep", "'deep' is not one of stat, digest"),
        ("model", "load is the high"),
    ):
        with pytest.raises(ConfigError, match=why):
            validate(Checkpoint(str(tmp_path)), level=level)


def test_of_several_locations_the_worst_is_told() -> None:
    well = Report("sft", NAME, NAME, 0, "digest", "ok", (), "", 5, ())
    reports = [
        well,
        replace(
            well, verdict="damaged", findings=(VerifyFinding("digest", "state", "other bytes"),)
        ),
        replace(well, verdict="incomplete"),
    ]
    told = ray_checkpoints.summarize_reports("sft", reports)
    assert (told["ckptsync_verdict"], told["ckptsync_read"], told["ckptsync_findings"]) == (
        "damaged",
        15,
        ["digest: state: other bytes"],
    )


NOTE = Note("s3://bucket/checkpoints", "sft", "checkpoint_000001", "checkpoint_000001~ab12")


def test_a_note_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = tmp_path / "experiment" / "checkpoint_000001"
    ray_checkpoints.write_note(Disk(), str(folder), NOTE)
    ray_checkpoints.write_note(Disk(), str(folder), NOTE)  # another rank
    assert ray_checkpoints.read_note(Checkpoint(str(folder))) == NOTE
    assert [path.name for path in folder.iterdir()] == ["ckptsync.json"]


@pytest.mark.parametrize(
    "told",
    [
        b"",
        b"[]",
        b'{"store": "/s"}',
        b"[" * 100_000,
        json.dumps({"store": "/s", "run": "r", "checkpoint": "../c", "location": "p"}).encode(),
        json.dumps({"store": "/s", "run": "", "checkpoint": "c", "location": "p"}).encode(),
        json.dumps({"store": "/s", "run": 1, "checkpoint": "c", "location": "p"}).encode(),
    ],
)
def test_what_is_no_note_is_refused(told: bytes) -> None:
    with pytest.raises(Corrupt, match="a checkpoint reference"):
        ray_checkpoints.decode_note(told, "ckptsync.json")
