"""The demo's story: it believes nothing that it has not seen in the store."""

from pathlib import Path

import pytest

from ckptsync.catalogue.fresh import fresh
from ckptsync.cli.demo import CHECKPOINT, Story, a_byte_of_a_tensor, configurations, damage
from ckptsync.cli.demo_nodes import DATA, flip, play, script
from ckptsync.cli.demo_view import Lines
from ckptsync.config.loading import read
from ckptsync.errors import Corrupt
from ckptsync.layouts import table
from ckptsync.stores.opening import open_store
from ckptsync.stores.tree import LocalFiles
from ckptsync.verify.due import Schedule
from tests.cli_store import make
from tests.heads import verify_next


def test_every_configuration_is_a_good_one(tmp_path: Path) -> None:
    import yaml

    for name, configuration in configurations(tmp_path).items():
        assert read(yaml.safe_dump(configuration), name, {}).node == name


def test_the_bit_that_flips_lies_inside_the_tensor_that_is_named(tmp_path: Path) -> None:
    checkpoint = make(tmp_path / "store") / "fsdp2" / CHECKPOINT
    path, at, name = a_byte_of_a_tensor(checkpoint)
    files = LocalFiles(str(checkpoint))
    [tensor] = [t for t in table.tensors(files, table.choose(files, None)) if t.name == name]
    extents = [part.extent for copy in tensor.copies for part in copy.parts if part.extent.file == path]
    assert any(e.start <= at < e.start + e.size for e in extents)


def test_damage_is_seen_only_in_a_new_report_of_that_file(tmp_path: Path) -> None:
    store = make(tmp_path / "store")
    path, at, name = a_byte_of_a_tensor(store / "fsdp2" / CHECKPOINT)
    flip(store / "fsdp2" / CHECKPOINT / path, at)
    verify_next(open_store(str(store)), Schedule(every=0.0), 1e10)
    [seen] = [s for s in fresh(open_store(str(store))).readable if s.run == "fsdp2"]
    found = damage(seen, set(), path)
    assert found
    assert name in found[1].tensors
    assert damage(seen, set(), "another") is None
    assert damage(seen, set(seen.records.reports), path) is None


def staged(tmp_path: Path) -> Story:
    story = Story(tmp_path, open_store(str(make(tmp_path / "store"))), (), Lines())
    for run in ("fsdp2", "zero3"):
        list(play(script(run, DATA / run, story.output(run)), pause=0))
    return story


def test_a_store_that_differs_in_one_bit_is_not_compared_as_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    story = staged(tmp_path)
    monkeypatch.setattr("ckptsync.cli.demo.RUNS", ("fsdp2",))
    story._compare()
    flip(story.model("fsdp2") / "model.safetensors", 5000)
    with pytest.raises(Corrupt, match=r"model\.safetensors"):
        staged_again(story)._compare()
    flip(tmp_path / "store" / "fsdp2" / CHECKPOINT / "scheduler.pt", 100)
    with pytest.raises(Corrupt, match=r"scheduler\.pt: the store and the node differ"):
        story._compare()


def staged_again(story: Story) -> Story:
    """Where the last comparison merged to must be free again."""
    import shutil

    shutil.rmtree(story.directory / "merged-here")
    return story
