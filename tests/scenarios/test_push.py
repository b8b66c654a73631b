"""What `push` takes for a checkpoint, under which name it lies in the store then, and what it says
that it left out.
"""

from __future__ import annotations

import pytest

from tests.scenarios.world import World, copy_save, files_below


@pytest.mark.stores("path")
def test_a_copy_of_a_checkpoint_is_sent_whole_under_the_name_that_the_user_gives(
    world: World,
) -> None:
    copy = world.save("sft").rename(world.output("sft") / "checkpoint-4 (copy)")
    refused = world.push(copy, code=2)
    assert "checkpoint-4 (copy)" in refused.err
    assert "--as" in refused.err
    world.push(copy, "--as", "checkpoint-4")
    assert world.stored("sft", "checkpoint-4") == files_below(copy)


@pytest.mark.stores("path")
def test_a_directory_that_a_layout_reads_is_sent_under_its_own_name_also_behind_a_link(
    world: World,
) -> None:
    shards = world.home / "shards" / "dcp"
    copy_save(
        next(path.parent for path in world.save("any", vector="hf-fsdp1").rglob(".metadata")),
        shards,
    )
    world.push(shards)
    assert world.stored("shards", "dcp") == files_below(shards)
    link = world.home / "links" / "checkpoint-9"
    link.parent.mkdir()
    link.symlink_to(shards)
    refused = world.push(link.parent, code=2)
    assert str(link) in refused.err, (
        "a link is followed where it is named, and not where it is found"
    )
    world.push(link)
    assert world.stored("links", "checkpoint-9") == files_below(shards)


@pytest.mark.stores("path", "s3")
def test_a_link_in_a_checkpoint_is_left_out_and_said(world: World) -> None:
    saved = world.save("sft")
    secret = world.home / "secret"
    secret.write_text("not yours")
    (saved / "notes.txt").symlink_to(secret)
    [told] = world.push(saved, "--json").json["checkpoints"]
    assert told["left_out"] == ["notes.txt"]
    assert "notes.txt" not in world.stored("sft", "checkpoint-4")
    assert world.statuses() == {"sft/checkpoint-4": "COMPLETE"}
