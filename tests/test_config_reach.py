"""From what is configured to what stores are given."""

from __future__ import annotations

import pytest

from ckptsync.config.loading import read
from ckptsync.config.reach import limits, options_for
from ckptsync.stores.limits import Limits, TokenBucket, Unlimited

STORE = "store: {url: /mnt/x}\nroles: [head]\n"


def test_the_defaults_are_those_of_the_stores() -> None:
    found = limits(read(STORE, "c", {}).limits)
    assert isinstance(found.pace, Unlimited)
    wanted = Limits()
    for name in ("threads", "memory", "patience", "stall"):
        assert getattr(found, name) == getattr(wanted, name), name


@pytest.mark.parametrize("text", ["50MB/s", "'08:00,50M 19:00,off'", "Mon-08:00,10M Sat-00:00,off"])
def test_a_bandwidth_is_a_pace(text: str) -> None:
    assert isinstance(limits(read(STORE + f"limits:\n  bandwidth: {text}\n", "c", {}).limits).pace, TokenBucket)


@pytest.mark.parametrize("text", ["off", "'off'", "'08:00,off 19:00,off'"])
def test_off_is_no_limit_however_yaml_reads_it(text: str) -> None:
    assert isinstance(limits(read(STORE + f"limits:\n  bandwidth: {text}\n", "c", {}).limits).pace, Unlimited)


def test_options_of_several_kinds_are_given_to_their_own() -> None:
    several = {"s3": {"profile": "lab"}, "sftp": {"port": 2222}}
    assert options_for("s3://bucket/x", several) == {"profile": "lab"}
    assert options_for("sftp://host/x", several) == {"port": 2222}
    assert options_for("s3://bucket/x", {"profile": "lab"}) == {"profile": "lab"}
    assert options_for("/mnt/x", several) == several, "which says so: a path has no options"
