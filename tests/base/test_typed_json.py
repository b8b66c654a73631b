"""JSON from a store, a trainer's directory or a cache: values, or one error about that file."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from dataclasses import dataclass

import pytest

from ckptsync.errors import Corrupt
from ckptsync.plain_json import parse
from ckptsync.typed_json import Count, Decoder, Seconds, format_number


@dataclass(frozen=True, slots=True)
class _Kind:
    format: int = 1
    n: Count = 0
    told: Seconds = 0.0
    name: str = ""


DECODER = Decoder(_Kind, "a kind", 1 << 20)
NO_JSON = {
    "empty": b"",
    "cut": b'{"n":',
    "not UTF-8": b'{"name":"\xff"}',
    "UTF-8 of half a character": b'{"name":"\xed\xa0\x80"}',
    "half a character": b'{"name":"\\ud800"}',
    "a byte order mark": b"\xef\xbb\xbf{}",
    "UTF-16": '{"n":1}'.encode("utf-16"),
    "a control character": b'{"name":"\x00"}',
    "deep": b"[" * 200_000,
    "deep in a field that nobody knows": b'{"zz":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a number of 5000 digits": b'{"n":' + b"9" * 5000 + b"}",
}
OTHER_KIND = {
    "below zero": b'{"n":-1}',
    "2**63": b'{"n":9223372036854775808}',
    "not a number": b'{"told":NaN}',
    "infinite": b'{"told":1e999}',
}


@pytest.mark.parametrize(
    "data", [*NO_JSON.values(), *OTHER_KIND.values()], ids=[*NO_JSON, *OTHER_KIND]
)
def test_what_is_no_value_of_a_type_is_one_error_that_names_the_file(data: bytes) -> None:
    with pytest.raises(Corrupt, match=r"^f: not a kind: ") as caught:
        DECODER.decode(data, "f")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("data", NO_JSON.values(), ids=NO_JSON)
def test_what_is_no_json_is_one_error_that_names_the_file(data: bytes) -> None:
    with pytest.raises(Corrupt, match=r"^f: not an index: ") as caught:
        parse(data, "f", "an index")
    assert len(str(caught.value)) < 300
    with pytest.raises(Corrupt):
        parse(data.decode("utf-8", "surrogateescape"), "f")


def test_whole_characters_and_what_trainers_write_are_values() -> None:
    assert parse(b'{"a":"\\ud83d\\ude00","b":"\xc3\xa9"}', "f") == {"a": "\U0001f600", "b": "\xe9"}
    assert (
        repr(parse(b"[NaN, -Infinity, 1000000000000000019884624838656]", "f"))
        == "[nan, -inf, 1000000000000000019884624838656]"
    )


@pytest.mark.parametrize("number", [b"true", b"1.0", b'"1"', b"0", b"-1", b"null", b"9" * 30])
def test_a_format_number_is_a_number_from_one(number: bytes) -> None:
    assert format_number(b'{"format":1}', "f", "a kind") == 1
    with pytest.raises(Corrupt, match="f: not a kind"):
        format_number(b'{"format":%s}' % number, "f", "a kind")


def test_more_bytes_than_a_kind_may_have_are_not_decoded() -> None:
    assert DECODER.decode(b'{"n":1}' + b" " * ((1 << 20) - 7), "f") == _Kind(n=1)
    with pytest.raises(Corrupt, match="f: 1048577 bytes, at most 1048576 expected of a kind"):
        DECODER.decode(b'{"n":1}' + b" " * ((1 << 20) - 6), "f")


def test_fields_that_the_type_does_not_have_are_not_built() -> None:
    data = b'{"n":1,"format":1,"zz":[' + b"[],[[]]," * 500_000 + b"[]]}"
    decoder = Decoder(_Kind, "a kind", len(data))
    tracemalloc.start()
    try:
        assert (decoder.decode(data, "f").n, format_number(data, "f", "a kind")) == (1, 1)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20  # as values they take 80 MB
    finally:
        tracemalloc.stop()


_SHORT_OF_MEMORY = """
import resource
from ckptsync.errors import Corrupt
from ckptsync.records.io import LIMITS, decode, encode
from ckptsync.records.store_paths import RecordName
from ckptsync.digest import digest
from ckptsync.plain_json import parse

data = b'{"format":1,"run":"r","checkpoint":"c","location":"c","n":0,"node":"a","ranks":[' + \
b"1000," * 6_000_000 + b"0]}"
name = RecordName("r", "c", "manifest", "a", 0, digest(data)[:16])
held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held + (64 << 20), resource.RLIM_INFINITY))
for read in (lambda: decode(str(name), data), lambda: parse(data, "f")):
    try:
        read()
    except Corrupt as e:
        print(e)
"""


def test_too_little_memory_for_one_file_is_that_files_fault() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SHORT_OF_MEMORY], capture_output=True, text=True, check=False
    )
    told = done.stdout.splitlines()
    assert (len(told), done.returncode) == (2, 0), done.stderr
    assert all(line.endswith("it takes more memory than there is") for line in told)
