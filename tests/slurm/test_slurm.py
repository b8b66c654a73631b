"""The batch script of docs/slurm.md under a real Slurm."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.slurm import train
from tests.slurm.cluster import NODES, CannotStartError, Cluster
from tests.slurm.watched import Watched
from tests.support.run_documents import ROOT, Location, blocks, location

STEPS = 12


class Job(Watched):
    """The job of the document."""

    def __init__(self, place: Location, cluster: Cluster) -> None:
        super().__init__(place)
        self.cluster = cluster
        self.id = ""

    def submit(self) -> None:
        work = self.place.home / "work"
        shutil.copy(ROOT / "tests" / "slurm" / "train.py", work)
        for block in blocks((ROOT / "docs" / "slurm.md").read_text()):
            if block.mark == "file":
                self.place.do(block)
        self.id = self.cluster.submit(work / "train.sbatch", self.environment)

    def wait_for_step(self, step: int) -> None:
        self.wait(lambda: self.has_reached(step), f"reach step {step}")

    def wait_until_verified(self, step: int) -> None:
        self.wait(lambda: self.is_verified(step), f"get checkpoint-{step} VERIFIED")

    def wait_for_restart(self, count: int) -> None:
        """Wait until the job is queued again for the `count`-th time, and has ended before."""
        self.wait(lambda: self.cluster.restarts(self.id) == count, f"be requeued {count} times")
        self.wait(lambda: self.cluster.state(self.id) == "PENDING", "end")

    def wait(self, is_so: Callable[[], bool], what: str) -> None:
        """Wait until a condition holds.  Raises AssertionError, with all logs, if it never does."""
        try:
            self.cluster.wait(self.id, is_so, what)
        except AssertionError as e:
            log = self.place.home / "work" / "train.log"
            text = log.read_text(errors="replace")[-6000:] if log.exists() else "no log"
            raise AssertionError(f"{e}\n{text}\n{self.ls().stdout}") from None


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    if "CKPTSYNC_TEST_SLURM" not in os.environ:
        pytest.skip("make slurm runs it")
    with location(tmp_path) as place:
        try:
            cluster = Cluster(tmp_path / "slurm", tmp_path / "data")
        except CannotStartError as e:
            pytest.skip(str(e))
        try:
            yield Job(place, cluster)
        finally:
            cluster.close()


def test_a_requeued_job_goes_on_from_the_newest_verified_step_with_the_same_losses(
    job: Job,
) -> None:
    job.start_head()
    job.allow(5)
    job.submit()
    job.wait_for_step(5)

    job.cluster.run("scancel", "--batch", "--signal=USR1", job.id)
    job.wait_for_restart(1)
    job.wait_until_verified(5)  # saved at SIGTERM, and uploaded before the job ended
    job.allow(9)
    job.cluster.start_now(job.id)
    job.wait_for_step(9)

    job.wait_until_verified(8)
    job.cluster.run("scontrol", "requeue", job.id)
    job.wait_for_restart(2)
    shutil.rmtree(job.cluster.disk_of(NODES[1]) / "out")
    job.wait_until_verified(9)
    job.allow(STEPS)
    job.cluster.start_now(job.id)
    job.wait(lambda: job.cluster.state(job.id) == "COMPLETED", "complete")

    for node in range(len(NODES)):
        lines = job.logged(node)
        assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
        assert [line["loss"] for line in lines] == train.losses(node, STEPS)
        begun = {(line["attempt"], line["start"]) for line in lines}
        assert begun == {("0", 0), ("1", 5), ("2", 9)}
