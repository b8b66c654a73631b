from __future__ import annotations

import pytest

from ckptsync.errors import ConfigError
from ckptsync.hooks.asked import Asked, asked, seconds


def test_nothing_is_asked_for_where_nothing_is_said() -> None:
    assert asked({}) == asked({"CKPTSYNC_STORE": " ", "CKPTSYNC_WAIT": ""}) == Asked("", 0.0)


@pytest.mark.parametrize(("text", "wait"), [("600", 600.0), ("0", 0.0), ("1.5", 1.5), ("10m", 600.0), ("1h30m", 5400.0)])
def test_a_wait_is_seconds_or_a_duration(text: str, wait: float) -> None:
    assert asked({"CKPTSYNC_STORE": "s3://bucket", "CKPTSYNC_WAIT": text}) == Asked("s3://bucket", wait)
    assert seconds("wait", text) == seconds("wait", wait) == wait


def test_a_run_is_named() -> None:
    assert asked({"CKPTSYNC_STORE": "/store", "CKPTSYNC_RUN": " qwen-sft "}) == Asked("/store", run="qwen-sft")


@pytest.mark.parametrize("text", ["soon", "-5", "1e9", "nan", ".", "²", "9" * 400])
def test_any_other_wait_is_refused_by_name_and_the_other_options_hold(text: str) -> None:
    told = asked({"CKPTSYNC_STORE": "/store", "CKPTSYNC_RUN": "sft", "CKPTSYNC_WAIT": text})
    assert (told.store, told.wait, told.run) == ("/store", 0.0, "sft")
    assert isinstance(told.refused, ConfigError)
    assert str(told.refused).startswith("CKPTSYNC_WAIT: ")
    assert told.refused.hint


@pytest.mark.parametrize("wait", ["soon", -5.0, float("nan"), float("inf"), None])
def test_a_wait_that_a_script_passes_is_refused_by_name(wait: object) -> None:
    with pytest.raises(ConfigError, match="CkptSyncCallback"):
        seconds("CkptSyncCallback(wait=…)", wait)  # type: ignore[arg-type]
