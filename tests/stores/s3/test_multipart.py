"""What is sent again after a kill, and what two writers of one key do to each other, on
SeaweedFS.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from ckptsync.errors import Exists, Incomplete, StoreError, Transient
from ckptsync.stores.contract import About, read_all
from ckptsync.stores.limits import Limits
from ckptsync.stores.s3.store import S3Store
from ckptsync.stores.urls import Remote
from tests.support.fault_proxy import HttpProxy
from tests.support.network_faults import Answer, once
from tests.support.scripted_s3 import Asked, Say, error, scripted
from tests.support.seaweedfs import weed

PART = 5 << 20
CHUNK = PART // 5
CONTENT = random.Random(4).randbytes(4 * PART - 3)
ABOUT = About(len(CONTENT), "node0:/out/model:1:2")
Plan = Any


class Killed(BaseException):
    """Nothing handles it."""


@pytest.fixture
def bucket() -> str:
    return weed().bucket()


@contextlib.contextmanager
def proxied(
    bucket: str, plan: Plan = lambda _: None, patience: float = 20.0
) -> Iterator[tuple[S3Store, HttpProxy]]:
    with closing(HttpProxy(("127.0.0.1", weed().port), plan)) as proxy:
        yield opened(bucket, f"http://127.0.0.1:{proxy.port}", patience), proxy


def opened(bucket: str, endpoint: str = "", patience: float = 20.0) -> S3Store:
    options = {**weed().options(), **({"endpoint_url": endpoint} if endpoint else {})}
    store = S3Store(Remote("s3", f"{bucket}/run"), options, Limits(patience=patience, threads=1))
    store.least = PART
    return store


def chunks(content: bytes = CONTENT) -> Iterator[memoryview]:
    for start in range(0, len(content), CHUNK):
        yield memoryview(content)[start : start + CHUNK]


def dying(bucket: str, parts: int, content: bytes) -> Iterator[memoryview]:
    """As many parts are given out, and no more; it dies once they are stored."""
    before, end = stored_parts(bucket), time.monotonic() + 60
    yield from chunks(content[: parts * PART + 1])
    while stored_parts(bucket) < before + parts:
        assert time.monotonic() < end
        time.sleep(0.01)
    raise Killed


def stored_parts(bucket: str) -> int:
    """Of all unfinished uploads together."""
    client = weed().client()
    found = client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])
    counts = [
        len(client.list_parts(Bucket=bucket, Key=u["Key"], UploadId=u["UploadId"]).get("Parts", []))
        for u in found
    ]
    return sum(counts)


def killed(bucket: str, parts: int, content: bytes = CONTENT, name: str = "model") -> None:
    with pytest.raises(Killed):
        opened(bucket).create(
            name, dying(bucket, parts, content), About(len(content), ABOUT.origin)
        )


def uploads(bucket: str) -> int:
    return len(weed().client().list_multipart_uploads(Bucket=bucket).get("Uploads", []))


def test_what_a_killed_try_has_sent_is_not_sent_again(bucket: str) -> None:
    killed(bucket, 2)
    with proxied(bucket) as (store, proxy):
        store.create("model", chunks(), ABOUT)
        assert proxy.requests["UploadPart"] == 2
        assert proxy.requests["CreateMultipartUpload"] == 0
    assert read_all(opened(bucket), "model") == CONTENT
    assert uploads(bucket) == 0


def test_an_upload_of_other_bytes_is_left_alone_and_the_better_of_two_is_continued(
    bucket: str,
) -> None:
    other = bytes(reversed(CONTENT))
    killed(bucket, 1)
    killed(bucket, 2, other)
    with proxied(bucket) as (store, proxy):
        store.create("model", chunks(), ABOUT)
        assert proxy.requests["UploadPart"] == 3
    assert read_all(opened(bucket), "model") == CONTENT
    assert uploads(bucket) == 1, "the other one may be somebody's who is still at work"


def test_a_neighbour_whose_name_begins_alike_is_not_continued(bucket: str) -> None:
    killed(bucket, 3, name="model2")
    with proxied(bucket) as (store, proxy):
        store.create("model", chunks(), ABOUT)
        assert proxy.requests["UploadPart"] == 4
    assert uploads(bucket) == 1


def test_without_an_origin_nothing_is_continued_nor_left(bucket: str) -> None:
    killed(bucket, 2)
    with proxied(bucket) as (store, proxy):
        store.write("model", chunks())
        assert (proxy.requests["UploadPart"], proxy.requests["ListMultipartUploads"]) == (4, 0)
        with pytest.raises(Killed):
            store.write("model", dying(bucket, 0, CONTENT[: 2 * PART]))
    assert uploads(bucket) == 1


def test_a_part_that_somebody_else_has_replaced_is_never_mixed_in(bucket: str) -> None:
    killed(bucket, 2)
    client = weed().client()
    upload = client.list_multipart_uploads(Bucket=bucket)["Uploads"][0]["UploadId"]
    client.upload_part(
        Bucket=bucket, Key="run/model", UploadId=upload, PartNumber=2, Body=b"!" * PART
    )
    opened(bucket).create("model", chunks(), ABOUT)
    assert read_all(opened(bucket), "model") == CONTENT


def test_an_upload_that_another_removes_fails_the_write_and_the_next_one_begins_anew(
    bucket: str,
) -> None:
    def stolen() -> Iterator[memoryview]:
        for n, chunk in enumerate(chunks()):
            if n == 12:
                while not uploads(bucket):
                    time.sleep(0.01)
                found = weed().client().list_multipart_uploads(Bucket=bucket)["Uploads"][0]
                weed().client().abort_multipart_upload(
                    Bucket=bucket, Key=found["Key"], UploadId=found["UploadId"]
                )
            yield chunk

    with pytest.raises(Transient) as caught:
        opened(bucket).create("model", stolen(), ABOUT)
    assert "begins anew" in caught.value.hint
    opened(bucket).create("model", chunks(), ABOUT)
    assert read_all(opened(bucket), "model") == CONTENT


def test_a_part_that_fails_is_sent_again_alone(bucket: str) -> None:
    with proxied(bucket, once("UploadPart", Answer(503, "SlowDown"), 2)) as (store, proxy):
        store.create("model", chunks(), ABOUT)
        assert proxy.requests["UploadPart"] == 5
    assert read_all(opened(bucket), "model") == CONTENT


def test_a_name_that_is_taken_costs_no_bytes_and_is_compared(bucket: str) -> None:
    opened(bucket).create("model", chunks(), ABOUT)
    for content, is_same in [
        (CONTENT, True),
        (bytes(reversed(CONTENT)), False),
        (CONTENT[:-1], False),
    ]:
        with proxied(bucket) as (store, proxy):
            with pytest.raises(Exists, match="run/model") as caught:
                store.create("model", chunks(content), About(len(content), "o"))
            assert proxy.requests["UploadPart"] == 0
        assert caught.value.is_same is is_same
    assert uploads(bucket) == 0


def test_a_name_that_is_taken_meanwhile_is_not_replaced(bucket: str) -> None:
    def overtaken() -> Iterator[memoryview]:
        yield from chunks()
        weed().client().put_object(Bucket=bucket, Key="run/model", Body=b"theirs")

    killed(bucket, 1)
    with pytest.raises(Exists) as caught:
        opened(bucket).create("model", overtaken(), ABOUT)
    assert caught.value.is_same is False
    assert read_all(opened(bucket), "model") == b"theirs"
    assert uploads(bucket) == 0


def test_a_source_that_changes_leaves_no_upload(bucket: str) -> None:
    for content in (CONTENT + b"!", CONTENT[:-1]):
        with pytest.raises(Incomplete):
            opened(bucket).create("model", chunks(content), ABOUT)
    assert uploads(bucket) == 0


def test_an_upload_that_another_process_began_is_not_taken_from_it(bucket: str) -> None:
    killed(bucket, 1)
    with pytest.raises(Incomplete):
        opened(bucket).create("model", chunks(CONTENT[: 2 * PART]), ABOUT)
    assert uploads(bucket) == 1


def begun(_asked: Asked) -> Say:
    return Say(
        200,
        b"<InitiateMultipartUploadResult><UploadId>u1</UploadId></InitiateMultipartUploadResult>",
        {"x-amz-checksum-type": "FULL_OBJECT"},
    )


def stored(asked: Asked) -> Say:
    return Say(
        200,
        b"",
        {"ETag": '"opaque"', "x-amz-checksum-crc32": asked.headers.get("x-amz-checksum-crc32", "")},
    )


def completed(store: S3Store) -> None:
    store.least = 10
    store.write("model", [b"0123456789", b"abc"], About(13))


def test_a_server_that_gives_opaque_tags_is_told_them_and_the_sum_of_the_whole() -> None:
    with scripted(
        begun,
        stored,
        stored,
        Say(200, b"<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>"),
    ) as script:
        completed(script.store())
        last = script.asked[-1]
        assert last.body.count(b'<ETag>"opaque"</ETag>') == 2
        assert last.headers["x-amz-mp-object-size"] == "13"
        assert last.headers["x-amz-checksum-crc32"] == "zmitJg==", "of 0123456789abc"


@pytest.mark.parametrize(
    "theirs",
    [
        Say(200, b"", {"ETag": '"other-2"', "Content-Length": "13"}),
        Say(200, b"x", {"ETag": '"0-1"'}),
    ],
)
def test_somebody_elses_file_is_not_taken_for_ours_when_an_answer_was_lost(theirs: Say) -> None:
    lost = error(500, "InternalError"), error(404, "NoSuchUpload")
    with (
        scripted(begun, stored, stored, *lost, theirs) as script,
        pytest.raises(Transient, match="NoSuchUpload"),
    ):
        completed(script.store())
    with scripted(
        Say(404), error(404, "NoSuchKey"), begun, stored, stored, *lost, theirs
    ) as script:
        store = script.store()
        store.least = 10
        with pytest.raises(Exists) as caught:
            store.create("model", [b"0123456789", b"abc"], About(13))
    assert not caught.value.is_same


def test_a_file_with_our_checksum_is_ours_when_an_answer_was_lost() -> None:
    ours = Say(
        200,
        b"",
        {
            "ETag": '"kms-2"',
            "Content-Length": "13",
            "x-amz-checksum-crc32": "zmitJg==",
            "x-amz-checksum-type": "FULL_OBJECT",
        },
    )
    with scripted(
        begun, stored, stored, error(500, "InternalError"), error(404, "NoSuchUpload"), ours
    ) as script:
        completed(script.store())
        assert len(script.asked) == 6


def test_parts_that_are_no_longer_ours_fail_the_write_for_now() -> None:
    with (
        scripted(begun, stored, stored, error(400, "InvalidPart")) as script,
        pytest.raises(Transient) as caught,
    ):
        completed(script.store())
    assert "another writer" in caught.value.hint


@pytest.mark.parametrize("page", [b"", b"  ", b"<html><body>please log in</body></html>"])
def test_a_completion_that_nobody_has_confirmed_is_looked_into(page: bytes) -> None:
    says = (
        begun,
        stored,
        stored,
        Say(200, page),
        error(404, "NoSuchUpload"),
        Say(404),
        error(404, "NoSuchKey"),
    )
    with scripted(*says) as script, pytest.raises(Transient):
        completed(script.store())


def test_a_server_that_puts_other_bytes_together_is_not_believed() -> None:
    say = Say(
        200,
        b"<CompleteMultipartUploadResult><ChecksumCRC32>AAAAAA==</ChecksumCRC32><ChecksumType>FULL_OBJECT</ChecksumType></CompleteMultipartUploadResult>",
    )
    with (
        scripted(begun, stored, stored, say) as script,
        pytest.raises(StoreError, match="different bytes"),
    ):
        completed(script.store())
