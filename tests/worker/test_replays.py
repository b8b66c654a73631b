"""Real trainers' saves, judged after every single call: never finished before the last one, and
finished after it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ckptsync.checkpoint_dirs import find_checkpoint_dirs, list_checkpoint
from ckptsync.worker.finished import Rule, is_stable, judge
from ckptsync.worker.local_save import build_local_save
from ckptsync.worker.observation import Observation, Surroundings, observe
from tests.support.exhaustive import sampled
from tests.support.replays import S, Script, Stage, others, trainers, unproven

RULE = Rule(quiet=10, unmarked=60, doubtful=600)


def observations(out: Path, *, fresh: bool = False) -> Iterator[Observation]:
    for checkpoint_dir in find_checkpoint_dirs(out):
        save = build_local_save("run", checkpoint_dir, list_checkpoint(checkpoint_dir))
        yield observe(save, Surroundings(), is_new=fresh)


def is_finished(evidence: Observation, after: float) -> bool:
    """If nothing changes for so long."""
    return judge(evidence, after, RULE).finished


def rests(evidence: Observation) -> bool:
    """If nothing changes for some seconds, and then rotation takes it."""
    return is_stable(evidence, 9.9, RULE, judge(evidence, 9.9, RULE))


def played(out: Path, script: Script, stage: Stage | None = None) -> list[tuple[str, Observation]]:
    """What can be known after each call."""
    return [
        (done, observation)
        for done in (stage or Stage(out)).play(script)
        for observation in observations(out)
    ]


@pytest.mark.parametrize("name", [*trainers(), *others()])
def test_a_save_is_finished_after_its_last_call_and_never_before(tmp_path: Path, name: str) -> None:
    script = (trainers() | others())[name]
    *before, (_, last) = played(tmp_path, script)
    early = [done for done, observation in before if is_finished(observation, RULE.quiet)]
    assert set(early) <= {"rng_state_1.pth half", *script.late}, early
    assert is_finished(last, RULE.quiet)
    assert rests(last)


@pytest.mark.parametrize("name", [*trainers(), *others()])
def test_nothing_is_at_rest_before_the_last_call(tmp_path: Path, name: str) -> None:
    script = (trainers() | others())[name]
    *before, _ = played(tmp_path, script)
    assert {done for done, observation in before if rests(observation)} <= {*script.late}


@pytest.mark.parametrize("name", [*trainers(), *others()])
def test_a_save_over_an_old_one_is_not_finished_by_its_files(tmp_path: Path, name: str) -> None:
    script, stage = (trainers() | others())[name], Stage(tmp_path)
    played(tmp_path, script, stage)
    stage.now += 1000 * S
    *before, (_, last) = played(tmp_path, script, stage)
    early = {
        done
        for done, observation in before
        if is_finished(observation, RULE.quiet) or rests(observation)
    }
    assert early <= {*script.late}
    assert is_finished(last, RULE.quiet)


@pytest.mark.parametrize("hours", [1, -1])
@pytest.mark.parametrize(
    "name", [*trainers(), *(n for n, script in others().items() if not script.is_tracked)]
)
def test_a_clock_that_jumps_during_a_save_that_we_saw_begin_changes_nothing(
    tmp_path: Path, name: str, hours: int
) -> None:
    script = (trainers() | others())[name]
    calls = len(played(tmp_path / "all", script))
    for jump in sampled(range(0, calls, max(1, calls // 6)), 2, first=1):
        stage = Stage(tmp_path / str(jump))
        told: list[Observation] = []
        for n, _ in enumerate(stage.play(script)):
            stage.now += hours * 3600 * S if n == jump else 0
            told += observations(stage.out, fresh=True)
        assert [
            observation
            for observation in told[:-1]
            if is_finished(observation, RULE.quiet) or rests(observation)
        ] == [], jump
        assert is_finished(told[-1], RULE.quiet), jump
        assert rests(told[-1]), jump


@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("skyrl, megatron", "trainer_state.pt"),
        ("prime-rl, weights", "STABLE"),
        ("prime-rl", "__0_0.distcp"),
    ],
)
def test_a_save_that_was_killed_before_what_its_trainer_needs_is_never_finished(
    tmp_path: Path, name: str, last: str
) -> None:
    for done, observation in played(tmp_path, others()[name]):
        if done.startswith(last):
            break
        assert not is_finished(observation, 1e6), done


@pytest.mark.parametrize("name", unproven())
def test_where_nothing_tells_only_time_does(tmp_path: Path, name: str) -> None:
    told = played(tmp_path, unproven()[name])
    assert [done for done, observation in told if is_finished(observation, 59.9)] == []
    assert [done for done, observation in told[:-1] if rests(observation)] == []
    assert is_finished(told[-1][1], RULE.unmarked)


@pytest.mark.parametrize("name", unproven())
def test_another_node_or_a_later_save_tells_where_nothing_else_does(
    tmp_path: Path, name: str
) -> None:
    *_, (_, last) = played(tmp_path, unproven()[name])
    assert is_finished(replace(last, later=True), RULE.quiet)
    assert is_finished(replace(last, other_part=True), RULE.quiet)


def test_a_checkpoint_that_rotation_empties_is_never_at_rest(tmp_path: Path) -> None:
    for name, script in trainers().items():
        stage = Stage(tmp_path / name)
        played(stage.out, script, stage)
        stage.now += 2 * S
        for path in sorted((stage.out / script.checkpoint).rglob("*")):
            if path.is_file():
                path.unlink()
                stage._passed(path.parent)
                assert [
                    observation for observation in observations(stage.out) if rests(observation)
                ] == [], (name, path)
        shutil.rmtree(stage.out)
