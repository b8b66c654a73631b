"""The campaign of planted faults, in short: `make campaign-doctor` is the long one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.campaigns import doctor
from tests.campaigns.doctor_faults import FAULTS, SOUND, library
from tests.campaigns.nodes import Network, can_isolate
from tests.doctor.test_documents import kinds_of_the_code
from tests.support.exhaustive import in_exhaustive

# What this machine has not got, and tests of their own plant: rights of a server's users, adapters
# for RDMA, what a heart says.
ELSEWHERE = {
    "memlock",
    "store-create-again",
    "store-delete",
    "store-read",
    "store-write",
    "unreadable-facts",
    "one-node",
}


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    if not can_isolate():
        pytest.skip("only root may make network namespaces")
    with closing(Network(3)) as made:
        yield made


def test_each_kind_of_finding_is_planted() -> None:
    planted = {kind for one in FAULTS.values() for kind in one.kinds}
    assert kinds_of_the_code() - planted == ELSEWHERE
    assert planted <= kinds_of_the_code()
    assert len(FAULTS) >= 30
    assert not any(one.kinds for one in SOUND.values())


@in_exhaustive
def test_what_is_planted_is_found_and_what_is_sound_is_left_in_peace(network: Network) -> None:
    for one in (FAULTS["torch"], FAULTS["small-shm"], SOUND["debian"]):
        assert doctor.judged(one, network) == []


def test_what_is_missed_and_what_is_made_up_are_told(network: Network) -> None:
    found = library("clock", torch="2.7.1")
    missed, made_up = doctor.judged(found, network)
    assert missed == "MISSED clock"
    assert made_up.startswith("MADE UP versions-differ")
