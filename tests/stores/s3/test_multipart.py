"""What is sent again after a kill, what two writers of a key do to each other, what is removed."""

from __future__ import annotations

import contextlib
import email.utils
import random
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from botocore.httpsession import URLLib3Session

from ckptsync.digest import crc32
from ckptsync.errors import Exists, Incomplete, StoreError, Transient
from ckptsync.stores.contract import About, read_all
from ckptsync.stores.limits import Limits
from ckptsync.stores.part_upload import FilePart
from ckptsync.stores.s3.multipart_upload import (
    KeyTarget,
    SentPart,
    Unfinished,
    list_unfinished,
    remove_stale,
)
from ckptsync.stores.s3.requests import base64_of, md5
from ckptsync.stores.s3.store import S3Store
from ckptsync.stores.urls import Remote
from tests.support.fault_proxy import HttpProxy
from tests.support.scripted_s3 import Asked, Say, error, scripted
from tests.support.seaweedfs import weed
from tests.support.waiting import until

PART = 5 << 20
CHUNK = PART // 5
CONTENT = random.Random(4).randbytes(3 * PART - 3)
ABOUT = About(len(CONTENT), "node0:/out/model:1:2")
Plan = Any


class Killed(BaseException):
    """Nothing handles it."""


@pytest.fixture
def bucket() -> str:
    return weed().bucket()


@contextlib.contextmanager
def proxied(
    bucket: str, plan: Plan = lambda _: None, patience: float = 300.0
) -> Iterator[tuple[S3Store, HttpProxy]]:
    with closing(HttpProxy(("127.0.0.1", weed().port), plan)) as proxy:
        yield opened(bucket, f"http://127.0.0.1:{proxy.port}", patience), proxy


def opened(bucket: str, endpoint: str = "", patience: float = 300.0) -> S3Store:
    options = {**weed().options(), **({"endpoint_url": endpoint} if endpoint else {})}
    store = S3Store(Remote("s3", f"{bucket}/run"), options, Limits(patience=patience, threads=1))
    store.least = PART
    return store


def chunks(content: bytes = CONTENT) -> Iterator[memoryview]:
    for start in range(0, len(content), CHUNK):
        yield memoryview(content)[start : start + CHUNK]


def dying(bucket: str, parts: int, content: bytes) -> Iterator[memoryview]:
    """As many parts are given out, and no more; it dies once they are stored."""
    before = stored_parts(bucket)
    yield from chunks(content[: parts * PART + 1])
    assert until(lambda: stored_parts(bucket) == before + parts)
    raise Killed


def stored_parts(bucket: str) -> int:
    """Of all unfinished uploads together."""
    client = weed().client()
    uploads = client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])
    ids = [{"Bucket": bucket, "Key": u["Key"], "UploadId": u["UploadId"]} for u in uploads]
    return sum(len(client.list_parts(**upload).get("Parts", [])) for upload in ids)


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
        assert proxy.requests["UploadPart"] == 1
        assert proxy.requests["CreateMultipartUpload"] == 0
    assert read_all(opened(bucket), "model") == CONTENT
    assert uploads(bucket) == 0


def test_an_upload_that_was_killed_before_its_first_part_is_continued(bucket: str) -> None:
    for kind in ({}, {"ChecksumAlgorithm": "CRC32", "ChecksumType": "FULL_OBJECT"}):
        weed().client().create_multipart_upload(Bucket=bucket, Key="run/model", **kind)
        with proxied(bucket) as (store, proxy):
            store.write("model", chunks(), ABOUT)
            assert proxy.requests["CreateMultipartUpload"] == 0
            assert proxy.requests["UploadPart"] == 3
        assert uploads(bucket) == 0
    assert read_all(opened(bucket), "model") == CONTENT


def test_an_upload_of_other_bytes_is_left_alone_and_the_better_of_two_is_continued(
    bucket: str,
) -> None:
    other = bytes(reversed(CONTENT))
    killed(bucket, 1)
    killed(bucket, 2, other)
    with proxied(bucket) as (store, proxy):
        store.create("model", chunks(), ABOUT)
        assert proxy.requests["UploadPart"] == 2
    assert read_all(opened(bucket), "model") == CONTENT
    assert uploads(bucket) == 1, "the other one may be somebody's who is still at work"


def test_without_an_origin_nothing_is_continued_nor_left(bucket: str) -> None:
    killed(bucket, 2)
    with proxied(bucket) as (store, proxy):
        store.write("model", chunks())
        assert (proxy.requests["UploadPart"], proxy.requests["ListMultipartUploads"]) == (3, 0)
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
                assert until(lambda: uploads(bucket))
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


def test_a_name_that_is_taken_costs_no_bytes_and_is_compared(bucket: str) -> None:
    opened(bucket).create("model", chunks(), ABOUT)
    for content, expected in [
        (CONTENT, True),
        (bytes(reversed(CONTENT)), False),
        (CONTENT[:-1], False),
    ]:
        with proxied(bucket) as (store, proxy):
            with pytest.raises(Exists, match="run/model") as caught:
                store.create("model", chunks(content), About(len(content), "o"))
            assert proxy.requests["UploadPart"] == 0
        assert caught.value.is_same is expected
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


def test_a_source_that_changes_leaves_no_upload_but_that_of_another_process(bucket: str) -> None:
    for content in (CONTENT + b"!", CONTENT[:-1]):
        with pytest.raises(Incomplete):
            opened(bucket).create("model", chunks(content), ABOUT)
    assert uploads(bucket) == 0
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


LOST = (error(500, "InternalError"), error(404, "NoSuchUpload"))
THEIRS = [
    Say(200, b"", {"ETag": '"other-2"', "Content-Length": "13"}),
    Say(200, b"x", {"ETag": '"0-1"'}),
]
OURS = {"ETag": '"kms-2"', "Content-Length": "13", "x-amz-checksum-crc32": "zmitJg=="}
WRONG = "<ChecksumCRC32>AAAAAA==</ChecksumCRC32><ChecksumType>FULL_OBJECT</ChecksumType>"


def result(inner: str) -> Say:
    return Say(
        200, f"<CompleteMultipartUploadResult>{inner}</CompleteMultipartUploadResult>".encode()
    )


OLD = "this botocore gives a single request no timeout of its own"


@pytest.mark.parametrize(
    "answers",
    [
        [result("<ETag>x</ETag>")],
        [*LOST, Say(200, b"", {**OURS, "x-amz-checksum-type": "FULL_OBJECT"})],
    ],
    ids=["answered", "answer lost, and ours by its checksum"],
)
def test_a_completion_tells_opaque_tags_and_the_sum_of_the_whole(
    answers: list[Say], monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts, send = list[object](), URLLib3Session.send

    def noted(session: Any, request: Any) -> Any:
        context = getattr(request, "context", {"read_timeout": OLD})
        timeouts.append(context.get("read_timeout"))
        return send(session, request)

    monkeypatch.setattr(URLLib3Session, "send", noted)
    with scripted(begun, stored, stored, *answers) as script:
        completed(script.store())
        assert len(script.asked) == 3 + len(answers)
        # the server may have to copy all parts
        assert timeouts[:4] in ([None, None, None, 2 * 30.0], [OLD] * 4)
        completion = script.asked[3]
        assert completion.body.count(b'<ETag>"opaque"</ETag>') == 2
        assert completion.headers["x-amz-mp-object-size"] == "13"
        assert completion.headers["x-amz-checksum-crc32"] == "zmitJg==", "of 0123456789abc"


ABSENT = (Say(404), error(404, "NoSuchKey"))


@pytest.mark.parametrize(
    ("answers", "kind", "words"),
    [
        *([[*LOST, theirs], Transient, "NoSuchUpload"] for theirs in THEIRS),
        ([error(400, "InvalidPart")], Transient, "another writer"),
        *(
            ([Say(200, page), error(404, "NoSuchUpload"), *ABSENT], Transient, "")
            for page in (b"", b"  ", b"<html><body>please log in</body></html>")
        ),
        ([result(WRONG)], StoreError, "different bytes"),
    ],
)
def test_a_completion_that_is_not_proven_to_be_ours_is_an_error(
    answers: list[Say], kind: type[StoreError], words: str
) -> None:
    with scripted(begun, stored, stored, *answers) as script, pytest.raises(kind) as caught:
        completed(script.store())
    assert words in f"{caught.value} {caught.value.hint}"


@pytest.mark.parametrize(
    "answers",
    [
        *([*LOST, theirs] for theirs in THEIRS),
        [LOST[1], Say(200, b"", {**OURS, "x-amz-checksum-type": "FULL_OBJECT"})],
    ],
)
def test_somebody_elses_file_is_not_taken_for_ours_when_an_answer_was_lost(
    answers: list[Say],
) -> None:
    with scripted(*ABSENT, begun, stored, stored, *answers) as script:
        store = script.store()
        store.least = 10
        with pytest.raises(Exists) as caught:
            store.create("model", [b"0123456789", b"abc"], About(13))
    assert not caught.value.is_same


NOW = time.time()
DATE = {"Date": email.utils.formatdate(NOW, usegmt=True)}
DAY = 86400.0
SECOND = FilePart(2, 3, memoryview(b"abc"))
TAG = f'"{md5(b"abc").hex()}"'


def moment(ago: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(NOW - ago))


def page(*uploads: tuple[str, str, float], following: str = "") -> Say:
    row = "<Upload><Key>{}</Key><UploadId>{}</UploadId><Initiated>{}</Initiated></Upload>"
    body = "".join(row.format(key, upload, moment(ago)) for key, upload, ago in uploads)
    marker = f"<NextKeyMarker>{following}</NextKeyMarker><NextUploadIdMarker>m</NextUploadIdMarker>"
    return listing("ListMultipartUploads", body, marker if following else "")


def listed(*numbers: int, ago: float = 0, following: str = "") -> Say:
    row = "<Part><PartNumber>{}</PartNumber><Size>3</Size><ETag>{}</ETag>{}</Part>"
    modified = f"<LastModified>{moment(ago)}</LastModified>"
    body = "".join(row.format(number, TAG, modified) for number in numbers)
    marker = f"<NextPartNumberMarker>{following}</NextPartNumberMarker>"
    return listing("ListParts", body, marker if following else "")


def listing(name: str, body: str, marker: str) -> Say:
    """A page of a listing; ``marker`` where another one follows."""
    more = f"<IsTruncated>true</IsTruncated>{marker}" if marker else ""
    return Say(200, f"<{name}Result>{more}{body}</{name}Result>".encode(), DATE)


def test_pages_of_uploads_and_of_parts_are_followed() -> None:
    pages = [
        page(("pre/k", "u1", 9), following="pre/k"),
        page(("pre/k", "u2", 5), ("pre/k2", "u3", 1)),
        listed(1, following="1"),
        listed(2),
        listed(),
    ]
    with scripted(*pages) as script:
        found = list_unfinished(script.store().bucket, "pre/k")
        parts = {upload.id: [part.number for part in upload.parts] for upload in found}
        assert parts == {"u1": [1, 2], "u2": []}
        assert len(script.asked) == len(pages), "nothing is asked of pre/k2"
        assert script.asked[1].query["upload-id-marker"] == "m"
        assert script.asked[3].query["part-number-marker"] == "1"


def test_of_two_uploads_that_may_be_ours_the_one_with_more_parts_is_continued() -> None:
    parts = (SentPart(1, 3, TAG, 0, ""),)
    uploads = [Unfinished("k", "fewer", 0.0), Unfinished("k", "more", 0.0, parts=parts)]
    with scripted(stored) as script:
        target = KeyTarget(script.store().bucket, "k", 9, lambda: uploads, is_new=False)
        upload = target.begin()
        assert not upload.reuse_part(SECOND)
        upload.put(SECOND)
        assert script.asked[0].query["uploadId"] == "more"


def test_an_upload_with_other_checksums_is_not_continued() -> None:
    other = "<Key>pre/k</Key><UploadId>u</UploadId><ChecksumAlgorithm>SHA256</ChecksumAlgorithm>"
    with scripted(listing("ListMultipartUploads", f"<Upload>{other}</Upload>", "")) as script:
        assert list_unfinished(script.store().bucket, "pre/k") == []
        assert len(script.asked) == 1


def test_uploads_that_cannot_be_listed_are_not_continued_and_the_write_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with scripted(error(403, "AccessDenied")) as script:
        assert list_unfinished(script.store().bucket, "pre/k") == []
    assert "s3:ListBucketMultipartUploads" in caplog.text or "permission denied" in caplog.text
    with scripted(*[error(503, "SlowDown")] * 50) as script, pytest.raises(StoreError):
        list_unfinished(script.store(patience=0.1).bucket, "pre/k")


GOOD, CRC = SentPart(2, 3, TAG, 0, ""), base64_of(crc32(b"abc"))


@pytest.mark.parametrize(
    ("parts", "kind", "agrees"),
    [
        ([GOOD], "", True),
        ([GOOD], "FULL_OBJECT", True),
        ([GOOD], "COMPOSITE", False),
        ([SentPart(2, 3, f'"{"0" * 32}"', 0, "")], "", False),
        ([SentPart(2, 4, TAG, 0, "")], "", False),  # parts of another size
        ([SentPart(1, 3, TAG, 0, "")], "", None),
        ([GOOD, SentPart(9, 3, TAG, 0, "")], "", True),  # all parts, and killed before the end
        ([GOOD, SentPart(10, 3, TAG, 0, "")], "", False),  # another file's
        ([SentPart(2, 3, '"0"', 0, ""), GOOD], "", True),  # what was replaced is listed, too
        ([SentPart(2, 3, '"opaque"', 0, CRC)], "", True),
        ([SentPart(2, 3, TAG, 0, base64_of(0))], "", False),
        ([SentPart(2, 3, '"opaque"', 0, "")], "", False),  # it cannot be known
    ],
)
def test_an_upload_agrees_by_what_it_has(
    parts: list[SentPart], kind: str, *, agrees: bool | None
) -> None:
    upload = Unfinished("k", "u", 0.0, "CRC32" if kind else "", kind, tuple(parts))
    assert upload.agrees(SECOND, 9) is agrees


def test_only_what_was_given_up_below_one_of_our_stores_is_removed() -> None:
    found = page(
        ("pre/old", "u1", 9 * DAY), ("pre/slow", "u2", 9 * DAY), ("pre/new", "u3", 1 * DAY)
    )
    with scripted(
        Say(200, b"{}", DATE), found, listed(1, ago=8 * DAY), Say(204), listed(1, ago=60)
    ) as script:
        remove_stale(script.store().bucket, "pre/")
        removed = [a.key for a in script.asked if a.method == "DELETE"]
    assert removed == ["pre/old"]
    with scripted(Say(404), error(404, "NoSuchKey"), found) as script:
        remove_stale(script.store().bucket, "pre/")
        assert len(script.asked) == 2, "whose uploads these are is not known"


def test_a_sweep_that_fails_stops_no_write(caplog: pytest.LogCaptureFixture) -> None:
    denied, done = error(403, "AccessDenied"), Say(200, b"<CompleteMultipartUploadResult/>")
    with scripted(denied, denied, page(), begun, stored, stored, done) as script:
        store: S3Store = script.store()
        store.least = 10
        store.write("a", [b"0123456789abc"], About(13, "o"))
    assert "given up cannot be removed" in caplog.text
