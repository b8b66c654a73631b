"""What ``merge`` takes."""

import argparse

import pytest

from ckptsync.cli import arguments_merging


def parsed(words: str) -> dict[str, object]:
    command = argparse.ArgumentParser()
    arguments_merging.add(command)
    return vars(command.parse_args(words.split()))


def test_the_last_of_several_locations_is_where_it_is_written() -> None:
    found = parsed("a b out")
    assert (found["sources"], found["destination"]) == (["a", "b"], "out")


def test_a_merge_is_local_and_as_the_model_has_it_unless_something_else_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    found = parsed("a out")
    assert (found["engine"], found["dtype"], found["ray_address"], found["jobs"]) == ("local", "auto", "auto", None)
    assert parsed("a out --engine ray --dtype bf16 --jobs 2")["jobs"] == 2


def test_a_dtype_that_no_merge_writes_is_refused() -> None:
    with pytest.raises(SystemExit):
        parsed("a out --dtype int8")
