"""What a tick says for people and heartbeats."""

from __future__ import annotations

from ckptsync.errors import Corrupt
from ckptsync.worker.result import Phase, Progress, WorkerResult, failure


def test_what_is_on_its_way_and_what_failed_are_told_in_a_line_each() -> None:
    told: list[tuple[int, int, Phase]] = [
        (1, 0, "stored"),
        (2, 0, "waiting"),
        (2, 1, "waiting"),
        (3, 0, "failed"),
        (4, 0, "elsewhere"),
    ]
    progress = tuple(Progress("run", f"checkpoint-{n}", k, phase, "") for n, k, phase in told)
    failures = (failure("run", "checkpoint-3", Corrupt("x: torn", hint="look")), failure("run", "", Corrupt("y")))
    result = WorkerResult("n0", progress, (), failures)
    assert result.queue == ("run/checkpoint-2", "run/checkpoint-3")
    assert result.errors == ("run/checkpoint-3: x: torn", "run: y")
    assert (failures[0].error, failures[0].hint, failures[0].exit_code) == ("Corrupt", "look", 10)
