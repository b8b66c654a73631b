"""The campaign of planted faults, in short: `make campaign-doctor` is the long one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.campaigns.doctor import judged
from tests.campaigns.doctor_faults import FAULTS, SOUND, Fault
from tests.campaigns.nodes import Network, can_isolate
from tests.doctor.test_documents import kinds_of_the_code
from tests.support.exhaustive import in_exhaustive


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    if not can_isolate():
        pytest.skip("only root may make network namespaces")
    with closing(Network(3)) as made:
        yield made


def test_what_is_planted_are_kinds_that_there_are() -> None:
    planted = {kind for fault in FAULTS.values() for kind in fault.kinds.split()}
    assert planted <= kinds_of_the_code()
    assert len(planted) >= 30
    assert not any(fault.kinds for fault in SOUND.values())


@in_exhaustive
def test_what_is_planted_is_found_and_what_is_sound_is_left_in_peace(network: Network) -> None:
    for fault in (FAULTS["torch"], FAULTS["small-shm"], SOUND["debian"]):
        assert judged(fault, network) == []


def test_what_is_missed_and_what_is_made_up_are_told(network: Network) -> None:
    missed, made_up = judged(Fault("clock", versions={"torch": "2.7.1"}), network)
    assert missed == "MISSED clock"
    assert made_up.startswith("MADE UP versions-differ")
