"""What names a location; the command itself is with `test_cli_gc`."""

from __future__ import annotations

import pytest

from ckptsync.cli.keep import named
from ckptsync.errors import ConfigError


def test_a_run_may_have_slashes_in_its_name() -> None:
    assert named("a/b/checkpoint-4") == ("a/b", "checkpoint-4")


@pytest.mark.parametrize("what", ["../x/checkpoint-4", "a//checkpoint-4", "a/..", "a/b\x00"])
def test_what_would_lead_elsewhere_is_no_name(what: str) -> None:
    with pytest.raises(ConfigError, match="not a name that"):
        named(what)


@pytest.mark.parametrize("what", ["", "checkpoint-4", "/"])
def test_a_location_has_a_run(what: str) -> None:
    with pytest.raises(ConfigError, match="RUN/CHECKPOINT wanted"):
        named(what)
