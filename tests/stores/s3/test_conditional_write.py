"""Checksums and conditional writes, on SeaweedFS and on servers that know less."""

from __future__ import annotations

from base64 import b64encode

import pytest

from ckptsync.digest import crc32
from ckptsync.errors import Exists
from ckptsync.stores.s3.requests import PartSum, StoredObject, base64_of, sum_of, sum_parts
from ckptsync.stores.s3.requests import md5 as md5_of
from tests.support.scripted_s3 import Asked, Say, error, scripted

DATA = memoryview(b"0123456789")


def test_a_server_that_does_not_know_crc32_gets_md5s_from_then_on() -> None:
    def taking(asked: Asked) -> Say:
        return Say(200, b"", {"ETag": f'"{md5_of(asked.body).hex()}"'})

    unsigned = {"s3": {"payload_signing_enabled": False}}
    wanted = b64encode(md5_of(b"x")).decode()
    with scripted(taking, taking, taking) as script:
        store = script.store(config_kwargs=unsigned)
        for name in "ab":
            store.write(name, [b"x"])
        assert [a.headers.get("content-md5") for a in script.asked] == [None, wanted]
    with scripted(*[Say(200, b"", {"ETag": '"opaque"'})] * 2) as script:
        script.store(config_kwargs=unsigned).write("a", [b"x"])
        # of what it has stored it says nothing, so it is sent again
        assert [a.headers.get("content-md5") for a in script.asked] == [None, wanted]


GOOD, X, SUM = md5_of(DATA).hex(), md5_of(b"x").hex(), sum_of(DATA)
PARTS = sum_parts([sum_of(memoryview(part)) for part in (b"abc", b"de")])


@pytest.mark.parametrize(
    ("stored", "mine", "is_same"),
    [
        (StoredObject(10, f'"{GOOD}"', ""), SUM, True),
        (StoredObject(10, f'"{"0" * 32}"', ""), SUM, False),
        (StoredObject(9, f'"{GOOD}"', ""), SUM, False),
        (StoredObject(10, "", base64_of(crc32(DATA))), SUM, None),  # a CRC32 is no proof
        (StoredObject(10, f'"{GOOD}"', base64_of(1)), SUM, False),
        (StoredObject(5, f'"{PARTS.tag}"', ""), PARTS, True),
        (StoredObject(5, '"0-2"', ""), PARTS, None),  # parts may have been cut otherwise
        (StoredObject(6, f'"{PARTS.tag}"', ""), PARTS, False),
        (StoredObject(5, "", base64_of(PARTS.crc)), PARTS, None),
    ],
)
def test_what_is_there_is_compared_by_what_can_be_compared(
    stored: StoredObject, mine: PartSum, *, is_same: bool | None
) -> None:
    assert stored.is_same(mine) is is_same
    assert StoredObject(5, "", base64_of(PARTS.crc)).may_be(PARTS)
    assert not StoredObject(5, "", "").may_be(PARTS)


ABSENT = (Say(404), error(404, "NoSuchKey"))  # the second, to a GET, says that it is not the bucket


def put(asked: Asked) -> Say:
    return Say(
        200,
        b"",
        {
            "ETag": f'"{md5_of(asked.body).hex()}"',
            "x-amz-checksum-crc32": asked.headers["x-amz-checksum-crc32"],
        },
    )


def test_a_server_that_ignores_conditions_is_found_out_and_looked_at_first(
    caplog: pytest.LogCaptureFixture,
) -> None:
    there = Say(200, b"x", {"ETag": f'"{X}"'})
    with scripted(*ABSENT, put, put, there) as script:
        store = script.store()
        store.create("a", [b"x"])
        assert not store.is_exclusive
        assert "conditional" in caplog.text
        with pytest.raises(Exists) as caught:
            store.create("a", [b"x"])
        assert caught.value.is_same
        conditions = [a.headers.get("if-none-match") for a in script.asked if a.method == "PUT"]
        assert conditions == ["*", "*"]


BEGUN = Say(
    200, b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>"
)
UNABLE = error(501, "NotImplemented")


@pytest.mark.parametrize(
    ("files", "answers", "conditions"),
    [
        ({"a": b"x", "b": b"x"}, [UNABLE, put, Say(404), put], ["*", None, None]),
        (
            {"a": b"0123456789abc"},
            [BEGUN, put, put, UNABLE, Say(404), Say(200, b"<CompleteMultipartUploadResult/>")],
            [None, None, None, "*", None],
        ),
    ],
    ids=["small", "in parts"],
)
def test_a_server_that_refuses_conditions_is_written_without(
    files: dict[str, bytes], answers: list[Say], conditions: list[str | None]
) -> None:
    with scripted(*ABSENT, *answers) as script:
        store = script.store()
        store.least = 10
        for name, content in files.items():
            store.create(name, [content])
        assert not store.is_exclusive
        changes = [a for a in script.asked if a.method in ("PUT", "POST")]
        assert [a.headers.get("if-none-match") for a in changes] == conditions


@pytest.mark.parametrize(
    "headers",
    [
        {"ETag": f'"{md5_of(b"theirs").hex()}"', "x-amz-server-side-encryption": "aws:kms"},
        {"ETag": '"opaque-2"', "x-amz-checksum-crc32": "AAAAAA=="},  # of the parts' sums
        {
            "ETag": '"opaque"',
            "x-amz-checksum-crc32": "AAAAAA==",
            "x-amz-checksum-type": "COMPOSITE",
        },
    ],
)
def test_of_a_taken_name_whose_sums_say_nothing_nothing_is_claimed(headers: dict[str, str]) -> None:
    with scripted(Say(200, b"mine", headers)) as script, pytest.raises(Exists) as caught:
        script.store().create("a", [b"mine"])
    assert caught.value.is_same is None


def test_a_small_file_is_not_asked_for_once_the_server_is_known_to_keep_conditions() -> None:
    taken, theirs = error(412, "PreconditionFailed"), Say(200, b"x", {"ETag": f'"{X}"'})
    lost = error(500, "InternalError")
    with scripted(*ABSENT, put, taken, put, lost, taken, theirs, taken, theirs) as script:
        store = script.store()
        for name in "abc":
            store.create(name, [b"x"])
        with pytest.raises(Exists) as caught:
            store.create("d", [b"x"])
        assert caught.value.is_same
        methods = " ".join(asked.method for asked in script.asked)
        assert methods == "HEAD GET PUT PUT PUT PUT PUT HEAD PUT HEAD"
