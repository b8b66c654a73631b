"""Which attempt a node takes part in, by what its launcher and its scheduler say."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from ckptsync.errors import ConfigError
from ckptsync.resume.attempt import Attempt, next_try, read_attempt

SLURM = {"SLURM_JOB_ID": "77", "SLURM_NNODES": "4", "SLURM_STEP_ID": "0"}
OMPI = {"OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "prterun-n0-12@1", "SLURM_JOB_ID": "77"}


def read(environment: Mapping[str, str], **options: object) -> tuple[str, int]:
    attempt = read_attempt(environment, "n0", "fresh", **options)  # type: ignore[arg-type]
    assert attempt.node == "n0"
    return attempt.name, attempt.nnodes


@pytest.mark.parametrize(
    ("environment", "name", "nnodes"),
    [
        ({}, "fresh", 1),
        ({"NNODES": "1", "NODE_RANK": "0"}, "fresh", 1),
        (SLURM, "slurm-77.0.0", 4),
        (SLURM | {"SLURM_RESTART_COUNT": "3", "SLURM_STEP_ID": "2"}, "slurm-77.3.2", 4),
        (SLURM | {"SLURM_STEP_NUM_NODES": "2"}, "slurm-77.0.0", 2),
        (SLURM | {"NNODES": "3"}, "slurm-77.0.0", 3),
        (SLURM | {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "7"}, "slurm-77.0.0", 4),
        ({"SLURM_JOB_ID": "5", "SLURM_NNODES": "1"}, "slurm-5.0", 1),
        ({"TORCHELASTIC_RUN_ID": "j"}, "fresh", 1),
        ({"LOCAL_WORLD_SIZE": "1", "NODE_RANK": "0"}, "fresh", 1),
        ({"JOB_COMPLETION_INDEX": "0", "NNODES": "1"}, "fresh", 1),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "4"}, "slurm-77.0.0", 4),
        (OMPI, "a-prterun-n0-12-1.", 2),
        ({"NNODES": "2:2", "SLURM_JOB_ID": "5"}, "slurm-5.0", 2),
        ({"MIN_NNODES": "2", "MAX_NNODES": "2", "SLURM_JOB_ID": "5"}, "slurm-5.0", 2),
    ],
)
def test_variables_name_an_attempt(environment: dict[str, str], name: str, nnodes: int) -> None:
    found = read(environment)
    assert (found[0][:18], found[1]) == (name[:18], nnodes)
    assert read(OMPI) != read(OMPI | {"PMIX_NAMESPACE": "prterun-n0-12:1"})


def test_options_come_first() -> None:
    assert read(SLURM, name="mine", nnodes=9) == ("mine", 9)
    assert read(SLURM, name="a" * 100, nnodes=100_000) == ("a" * 100, 100_000)
    assert read({"JOB_COMPLETION_INDEX": "3"}, name="mine", nnodes=9) == ("mine", 9)


@pytest.mark.parametrize(
    ("environment", "options", "message"),
    [
        ({"NNODES": "2"}, {}, "--attempt"),
        # what stays, or differs between nodes, where a training begins again
        ({"GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "j"}, {}, "in front of torchrun"),
        ({"SKYPILOT_NUM_NODES": "2", "SKYPILOT_TASK_ID": "j"}, {}, "SKYPILOT_NODE_IPS"),
        ({"RAY_JOB_ID": "01000000"}, {"nnodes": 2}, "each try"),
        ({"PET_NNODES": "2", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}, {}, "$(JOB_UID)"),
        ({}, {"nnodes": 2}, "--attempt"),
        ({"NNODES": "1:4", "SLURM_JOB_ID": "7"}, {}, "1 to 4 nodes"),
        ({"MIN_NNODES": "1", "MAX_NNODES": "4", "SLURM_JOB_ID": "7"}, {}, "1 to 4 nodes"),
        ({"NNODES": "two"}, {}, "not a number"),
        ({"NODE_RANK": "1"}, {}, "not the only node"),
        ({"JOB_COMPLETION_INDEX": "0"}, {}, "--nnodes"),
        ({"OMPI_COMM_WORLD_RANK": "1"}, {}, "not the only node"),
        ({"LOCAL_WORLD_SIZE": "2"}, {}, "once on each node"),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2"}, {}, "--ntasks-per-node=1"),
        ({}, {"nnodes": 0}, "--nnodes 0"),
        ({}, {"nnodes": 100_001, "name": "a"}, "--nnodes 100001"),
        ({}, {"name": "a" * 101}, "not an attempt's name"),
        ({}, {"name": "../x"}, "not an attempt's name"),
        ({}, {"name": ""}, "not an attempt's name"),
    ],
)
def test_what_is_not_known_is_a_usage_error_that_says_what_to_give(
    environment: dict[str, str], options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(environment, **options)
    assert message in f"{caught.value} {caught.value.hint}"


def test_each_restart_is_an_attempt_of_its_own() -> None:
    first = Attempt("a", 2, "n0")
    assert [next_try(first, n).name for n in (1, 2)] == ["a.1", "a.2"]
    assert next_try(first, 1).nnodes == 2
