"""The campaign that kills pulls, in short: `make kill-pull` is the long one."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.campaigns.pull_kill import CHECKPOINT, Campaign
from tests.campaigns.trapping import can_trap
from tests.support.exhaustive import in_exhaustive


@in_exhaustive
@pytest.mark.skipif(not can_trap(), reason="strace is not installed, or may not trace")
def test_killed_at_a_system_call_a_pull_leaves_nothing_half_and_the_same_command_goes_on(
    tmp_path: Path,
) -> None:
    one = Campaign("posix", tmp_path, random.Random(1))
    one.run(4, random.Random(1))
    assert one.wrong == []
    assert one.deaths >= 3


def test_the_campaign_sees_what_is_half_there_late_or_left(tmp_path: Path) -> None:
    one, destination = Campaign("posix", tmp_path, random.Random(1)), tmp_path / "dst"
    shutil.copytree(tmp_path / "out" / CHECKPOINT, destination / CHECKPOINT)
    assert list(one.harm(destination)) == [f"{CHECKPOINT} is there without its time"]
    (destination / CHECKPOINT / "ballast.bin").unlink()
    (destination / "latest").write_text("global_step")
    (destination / ".hidden").mkdir()
    told = list(one.left(destination))
    assert told[0] == f"{CHECKPOINT} is there, and is not what it was"
    assert told[-2:] == [
        "latest says 'global_step'",
        f"there are {['.hidden', CHECKPOINT, 'latest']}",
    ]
