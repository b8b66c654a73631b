"""Finding unfinished uploads again, page by page, and removing those that were given up."""

from __future__ import annotations

import email.utils
import time

import pytest

from ckptsync.digest import crc32
from ckptsync.errors import StoreError
from ckptsync.stores.contract import About
from ckptsync.stores.part_upload import FilePart
from ckptsync.stores.s3.requests import base64_of, md5
from ckptsync.stores.s3.store import S3Store
from ckptsync.stores.s3.upload import SentPart, Unfinished, is_same, remove_stale, unfinished
from tests.support.scripted_s3 import Say, error, scripted

NOW = time.time()
DATE = {"Date": email.utils.formatdate(NOW, usegmt=True)}
DAY = 86400.0
PART = FilePart(2, 3, memoryview(b"abc"))
TAG = f'"{md5(b"abc").hex()}"'


def moment(ago: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(NOW - ago))


def page(*uploads: tuple[str, str, float], following: str = "") -> Say:
    body = "".join(
        (
            f"<Upload><Key>{k}</Key><UploadId>{u}</UploadId><Initiated>{moment(ago)}</Initiated>"
            "</Upload>"
        )
        for k, u, ago in uploads
    )
    more = (
        f"<IsTruncated>true</IsTruncated><NextKeyMarker>{following}</NextKeyMarker>"
        "<NextUploadIdMarker>m</NextUploadIdMarker>"
    )
    return Say(
        200,
        (
            f"<ListMultipartUploadsResult>{more if following else ''}{body}"
            "</ListMultipartUploadsResult>"
        ).encode(),
        DATE,
    )


def listed(*numbers: int, ago: float = 0, following: str = "") -> Say:
    body = "".join(
        (
            f"<Part><PartNumber>{n}</PartNumber><Size>3</Size><ETag>{TAG}</ETag><LastModified>"
            f"{moment(ago)}</LastModified></Part>"
        )
        for n in numbers
    )
    more = (
        f"<IsTruncated>true</IsTruncated><NextPartNumberMarker>{following}</NextPartNumberMarker>"
        if following
        else ""
    )
    return Say(200, f"<ListPartsResult>{more}{body}</ListPartsResult>".encode(), DATE)


def upload(*parts: SentPart, kind: str = "") -> Unfinished:
    return Unfinished("k", "u", 0.0, "CRC32" if kind else "", kind, parts)


def test_pages_of_uploads_and_of_parts_are_followed() -> None:
    pages = [
        page(("pre/k", "u1", 9), following="pre/k"),
        page(("pre/k", "u2", 5), ("pre/k2", "u3", 1)),
        listed(1, following="1"),
        listed(2),
        listed(),
    ]
    with scripted(*pages) as script:
        found = unfinished(script.store().bucket, "pre/k")
        assert [(o.id, [part.number for part in o.parts]) for o in found] == [
            ("u1", [1, 2]),
            ("u2", []),
        ]
        assert script.asked[1].query["upload-id-marker"] == "m"
        assert script.asked[3].query["part-number-marker"] == "1"


def test_uploads_that_cannot_be_listed_are_not_continued_and_the_write_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with scripted(error(403, "AccessDenied")) as script:
        assert unfinished(script.store().bucket, "pre/k") == []
    assert "s3:ListBucketMultipartUploads" in caplog.text or "permission denied" in caplog.text
    with scripted(*[error(503, "SlowDown")] * 50) as script, pytest.raises(StoreError):
        unfinished(script.store(patience=0.1).bucket, "pre/k")


def test_an_upload_agrees_by_what_it_has() -> None:
    good = SentPart(2, 3, TAG, 0, "")
    assert upload(good).agrees(PART, 9) is True
    assert upload(SentPart(2, 3, f'"{"0" * 32}"', 0, "")).agrees(PART, 9) is False
    assert upload(SentPart(2, 4, TAG, 0, "")).agrees(PART, 9) is False, "parts of another size"
    assert upload(SentPart(1, 3, TAG, 0, "")).agrees(PART, 9) is None
    assert upload(good, SentPart(10, 3, TAG, 0, "")).agrees(PART, 9) is False, "another file's"
    assert upload(good, kind="COMPOSITE").agrees(PART, 9) is False
    assert upload(good, kind="FULL_OBJECT").agrees(PART, 9) is True
    assert upload(SentPart(2, 3, '"0"', 0, ""), good).agrees(PART, 9) is True, (
        "some servers list what was replaced, too"
    )


def test_a_part_is_the_same_by_its_checksum_where_it_has_one_and_else_by_its_tag() -> None:
    crc = base64_of(crc32(b"abc"))
    assert is_same(SentPart(2, 3, '"opaque"', 0, crc), PART)
    assert not is_same(SentPart(2, 3, TAG, 0, base64_of(0)), PART)
    assert is_same(SentPart(2, 3, TAG, 0, ""), PART)
    assert not is_same(SentPart(2, 3, '"opaque"', 0, ""), PART), (
        "it cannot be known: it is sent again"
    )


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
    begun, done = (
        Say(
            200,
            (
                b"<InitiateMultipartUploadResult><UploadId>u</UploadId>"
                b"</InitiateMultipartUploadResult>"
            ),
        ),
        Say(200, b"<CompleteMultipartUploadResult/>"),
    )
    stored = [Say(200, b"", {"ETag": '"t"'})] * 2
    with scripted(
        error(403, "AccessDenied"), error(403, "AccessDenied"), page(), begun, *stored, done
    ) as script:
        store: S3Store = script.store()
        store.least = 10
        store.write("a", [b"0123456789abc"], About(13, "o"))
    assert "given up cannot be removed" in caplog.text
