"""Creating, on servers that keep to conditions and on those that do not."""

from __future__ import annotations

import pytest

from ckptsync.errors import Exists
from ckptsync.stores.contract import read_all
from ckptsync.stores.s3.store import S3Store
from ckptsync.stores.s3.sums import md5_of
from ckptsync.stores.urls import Remote
from tests.s3_script import Asked, Say, error, scripted
from tests.weed import weed

ABSENT = (Say(404), error(404, "NoSuchKey"))  # the second, to a GET, says that it is not the bucket


def put(asked: Asked) -> Say:
    return Say(200, b"", {"ETag": f'"{md5_of(asked.body).hex()}"', "x-amz-checksum-crc32": asked.headers["x-amz-checksum-crc32"]})


def test_a_server_that_refuses_the_second_time_is_not_yet_exclusive() -> None:
    store = S3Store(Remote("s3", weed().bucket()), weed().options())
    store.create("a", [b"x"])
    with pytest.raises(Exists) as caught:
        store.create("a", [b"x"])
    assert caught.value.is_same, "the same bytes are somebody else's all the same"
    assert not store.is_exclusive
    assert read_all(store, "a") == b"x"


def test_a_server_that_ignores_conditions_is_found_out_and_looked_at_first(caplog: pytest.LogCaptureFixture) -> None:
    there = Say(200, b"x", {"ETag": f'"{md5_of(b"x").hex()}"'})
    with scripted(*ABSENT, put, put, there) as script:
        store = script.store()
        store.create("a", [b"x"])
        assert not store.is_exclusive
        assert "conditional" in caplog.text
        with pytest.raises(Exists) as caught:
            store.create("a", [b"x"])
        assert caught.value.is_same
        assert [a.headers.get("if-none-match") for a in script.asked if a.method == "PUT"] == ["*", "*"]


def test_a_server_that_refuses_conditions_is_written_without() -> None:
    with scripted(*ABSENT, error(501, "NotImplemented"), put, Say(404), put) as script:
        store = script.store()
        store.create("a", [b"x"])
        store.create("b", [b"x"])
        assert not store.is_exclusive
        assert [a.headers.get("if-none-match") for a in script.asked if a.method == "PUT"] == ["*", None, None]


def test_a_large_file_for_a_server_that_refuses_conditions_is_completed_without() -> None:
    begun = Say(200, b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>")
    with scripted(
        *ABSENT, begun, put, put, error(501, "NotImplemented"), Say(404), Say(200, b"<CompleteMultipartUploadResult/>")
    ) as script:
        store = script.store()
        store.least = 10
        store.create("a", [b"0123456789abc"])
        assert [a.headers.get("if-none-match") for a in script.asked if a.method == "POST"] == [None, "*", None]


def test_a_taken_name_whose_tag_says_nothing_is_read_back() -> None:
    taken = Say(200, b"mine", {"ETag": '"opaque"', "x-amz-server-side-encryption": "aws:kms"})
    for body, is_same in [(b"mine", True), (b"fine", False)]:
        with scripted(taken, Say(206, body, {"Content-Range": "bytes 0-3/4"})) as script, pytest.raises(Exists) as caught:
            script.store().create("a", [b"mine"])
        assert caught.value.is_same is is_same


def test_a_small_file_is_not_asked_for_once_the_server_is_known_to_keep_conditions() -> None:
    with scripted(*ABSENT, put, error(412, "PreconditionFailed"), put) as script:
        store = script.store()
        store.create("a", [b"x"])
        store.create("b", [b"x"])
        assert [a.method for a in script.asked] == ["HEAD", "GET", "PUT", "PUT", "PUT"]
