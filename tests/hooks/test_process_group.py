from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckptsync.errors import ConfigError
from ckptsync.hooks.process_group import Rank, exchange, this_rank
from tests.support.ports import free_port

RANK = """
import sys
from datetime import timedelta
import torch.distributed as dist
from ckptsync.hooks.process_group import exchange, first_word
rank = int(sys.argv[1])
store = dist.TCPStore("127.0.0.1", int(sys.argv[2]), 2, is_master=rank == 0, \
timeout=timedelta(seconds=600))
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
if rank == 1:
    assert sys.stdin.readline() == "begin\\n"
first = exchange(rank, 2, f"first {rank}")
print(first(), first_word(f"I am {rank}"), flush=True)
assert sys.stdin.readline() == "look\\n"
print(first(), flush=True)
second = exchange(rank, 2, f"second {rank}")
dist.barrier()  # a gradient
print(second(), flush=True)
dist.barrier()
"""


def test_one_process_agrees_with_itself() -> None:
    assert exchange(0, 1, "me")() == ("me",)


def start(rank: int, port: int) -> subprocess.Popen[str]:
    root = Path(__file__).parent.parent.parent
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RANK, str(rank), str(port)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=root
    )


def tell(child: subprocess.Popen[str], line: str) -> None:
    assert child.stdin is not None
    child.stdin.write(line + "\n")
    child.stdin.flush()


def heard(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def test_ranks_learn_of_each_other_without_waiting() -> None:
    """Real processes, with the store that torch's rendezvous leaves."""
    pytest.importorskip("torch")
    port = free_port()
    with start(0, port) as zero, start(1, port) as one:
        assert heard(zero) == "None I am 0"  # rank 1 has not begun, and nobody waits for it
        tell(one, "begin")
        assert heard(one) == "('first 0', 'first 1') I am 0", (
            "the first to say a word said it for all"
        )
        for child in (zero, one):
            tell(child, "look")
        assert heard(zero) == heard(one) == "('first 0', 'first 1')"
        assert heard(zero) == heard(one) == "('second 0', 'second 1')"
    assert (zero.returncode, one.returncode) == (0, 0)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Rank(0, 1, can_meet=False)),
        (
            {"RANK": "3", "WORLD_SIZE": "8", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
            Rank(3, 8, can_meet=False),
        ),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, Rank(1, 2, can_meet=False)),
        ({"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "6"}, Rank(5, 6, can_meet=False)),
    ],
)
def test_what_started_this_process_says_its_rank(
    environment: dict[str, str], expected: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert this_rank(environment) == expected
    with pytest.raises(ConfigError, match="RANK=x"):
        this_rank({"RANK": "x", "WORLD_SIZE": "2"})
