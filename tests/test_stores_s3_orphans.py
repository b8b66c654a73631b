"""Finding unfinished uploads again, page by page, and removing those that were given up."""

from __future__ import annotations

import email.utils
import time

import pytest

from ckptsync.errors import StoreError
from ckptsync.stores.contract import About
from ckptsync.stores.parts import Part
from ckptsync.stores.s3.orphans import Orphan, is_same, orphans, sweep
from ckptsync.stores.s3.store import S3Store
from ckptsync.stores.s3.sums import crc_of, header, md5_of
from ckptsync.stores.s3.xml import Begun, Stored
from tests.s3_script import Say, error, scripted

NOW = time.time()
DATE = {"Date": email.utils.formatdate(NOW, usegmt=True)}
DAY = 86400.0
PART = Part(2, 3, memoryview(b"abc"))
TAG = f'"{md5_of(b"abc").hex()}"'


def moment(ago: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(NOW - ago))


def page(*uploads: tuple[str, str, float], following: str = "") -> Say:
    body = "".join(
        f"<Upload><Key>{k}</Key><UploadId>{u}</UploadId><Initiated>{moment(ago)}</Initiated></Upload>" for k, u, ago in uploads
    )
    more = f"<IsTruncated>true</IsTruncated><NextKeyMarker>{following}</NextKeyMarker><NextUploadIdMarker>m</NextUploadIdMarker>"
    return Say(200, f"<ListMultipartUploadsResult>{more if following else ''}{body}</ListMultipartUploadsResult>".encode(), DATE)


def listed(*numbers: int, ago: float = 0, following: str = "") -> Say:
    body = "".join(
        f"<Part><PartNumber>{n}</PartNumber><Size>3</Size><ETag>{TAG}</ETag><LastModified>{moment(ago)}</LastModified></Part>"
        for n in numbers
    )
    more = f"<IsTruncated>true</IsTruncated><NextPartNumberMarker>{following}</NextPartNumberMarker>" if following else ""
    return Say(200, f"<ListPartsResult>{more}{body}</ListPartsResult>".encode(), DATE)


def orphan(*stored: Stored, kind: str = "") -> Orphan:
    return Orphan(Begun("k", "u", 0.0, "CRC32" if kind else "", kind), stored, 0.0)


def test_pages_of_uploads_and_of_parts_are_followed() -> None:
    pages = [
        page(("pre/k", "u1", 9), following="pre/k"),
        page(("pre/k", "u2", 5), ("pre/k2", "u3", 1)),
        listed(1, following="1"),
        listed(2),
        listed(),
    ]
    with scripted(*pages) as script:
        found = orphans(script.store()._sender, "pre/k")
        assert [(o.begun.id, [s.number for s in o.stored]) for o in found] == [("u1", [1, 2]), ("u2", [])]
        assert script.asked[1].query["upload-id-marker"] == "m"
        assert script.asked[3].query["part-number-marker"] == "1"


def test_uploads_that_cannot_be_listed_are_not_continued_and_the_write_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    with scripted(error(403, "AccessDenied")) as script:
        assert orphans(script.store()._sender, "pre/k") == []
    assert "s3:ListBucketMultipartUploads" in caplog.text or "permission denied" in caplog.text
    with scripted(*[error(503, "SlowDown")] * 50) as script, pytest.raises(StoreError):
        orphans(script.store(patience=0.1)._sender, "pre/k")


def test_an_upload_agrees_by_what_it_has() -> None:
    good = Stored(2, 3, TAG, 0, "")
    assert orphan(good).agrees(PART, 9) is True
    assert orphan(Stored(2, 3, f'"{"0" * 32}"', 0, "")).agrees(PART, 9) is False
    assert orphan(Stored(2, 4, TAG, 0, "")).agrees(PART, 9) is False, "parts of another size"
    assert orphan(Stored(1, 3, TAG, 0, "")).agrees(PART, 9) is None
    assert orphan(good, Stored(10, 3, TAG, 0, "")).agrees(PART, 9) is False, "another file's"
    assert orphan(good, kind="COMPOSITE").agrees(PART, 9) is False
    assert orphan(good, kind="FULL_OBJECT").agrees(PART, 9) is True
    assert orphan(Stored(2, 3, '"0"', 0, ""), good).agrees(PART, 9) is True, "some servers list what was replaced, too"


def test_a_part_is_the_same_by_its_checksum_where_it_has_one_and_else_by_its_tag() -> None:
    crc = header(crc_of(b"abc"))
    assert is_same(Stored(2, 3, '"opaque"', 0, crc), PART)
    assert not is_same(Stored(2, 3, TAG, 0, header(0)), PART)
    assert is_same(Stored(2, 3, TAG, 0, ""), PART)
    assert not is_same(Stored(2, 3, '"opaque"', 0, ""), PART), "it cannot be known: it is sent again"


def test_only_what_was_given_up_below_one_of_our_stores_is_removed() -> None:
    found = page(("pre/old", "u1", 9 * DAY), ("pre/slow", "u2", 9 * DAY), ("pre/new", "u3", 1 * DAY))
    with scripted(Say(200, b"{}", DATE), found, listed(1, ago=8 * DAY), Say(204), listed(1, ago=60)) as script:
        sweep(script.store()._sender, "pre/")
        removed = [a.key for a in script.asked if a.method == "DELETE"]
    assert removed == ["pre/old"]
    with scripted(Say(404), error(404, "NoSuchKey"), found) as script:
        sweep(script.store()._sender, "pre/")
        assert len(script.asked) == 2, "whose uploads these are is not known"


def test_a_sweep_that_fails_stops_no_write(caplog: pytest.LogCaptureFixture) -> None:
    begun, done = (
        Say(200, b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>"),
        Say(200, b"<CompleteMultipartUploadResult/>"),
    )
    stored = [Say(200, b"", {"ETag": '"t"'})] * 2
    with scripted(error(403, "AccessDenied"), error(403, "AccessDenied"), page(), begun, *stored, done) as script:
        store: S3Store = script.store()
        store.least = 10
        store.write("a", [b"0123456789abc"], About(13, "o"))
    assert "given up cannot be removed" in caplog.text
