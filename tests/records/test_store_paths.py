from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.errors import Corrupt
from ckptsync.records.store_paths import RecordName, checked_own, node_file_name, parse_record_name

LETTERS = string.ascii_letters + string.digits + "_.-"
NODES = st.text(LETTERS, min_size=1, max_size=20)


@given(NODES, st.integers(0, 10**6), st.text("0123456789abcdef", min_size=16, max_size=16))
def test_names_come_back_as_they_were(node: str, n: int, end: str) -> None:
    name = RecordName("run", "checkpoint-5~1", "manifest", node, n, end)
    assert parse_record_name(str(name)) == name


@given(st.text(max_size=60))
def test_other_names_are_no_records(text: str) -> None:
    for name in (text, f"run/.ckptsync/checkpoint-5/{text}"):
        parsed = parse_record_name(name)
        assert parsed is None or str(parsed).count("/") == 3


def test_a_nodes_own_copy_is_never_taken_for_a_record() -> None:
    assert (
        parse_record_name(node_file_name("run", "c", "a", "model-0-0123456789abcdef.json")) is None
    )


def test_only_files_of_its_own_and_no_records_are_a_locations() -> None:
    prefixes = ("run/c/", "run/.ckptsync/c/")
    assert checked_own("run/c/a/b", prefixes) == "run/c/a/b"
    for name in ("run/c/../x", "run/d/a", "run/c/", "run/c/.CKPTSYNC/x/keep-0.json"):
        with pytest.raises(Corrupt):
            checked_own(name, prefixes)
