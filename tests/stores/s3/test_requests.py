"""What is learnt from a refusal, with a server that says what the test wants."""

from __future__ import annotations

import gzip
import itertools
import resource
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptsync.errors import CkptsyncError, ConfigError, NotFound, StoreError, Transient
from ckptsync.stores.contract import About
from ckptsync.stores.s3.store import S3Store
from tests.support.scripted_s3 import Asked, Say, error, scripted

FOUND = Say(200, b"x" * 3)

STORED = Say(200, b"", {"ETag": '"t"'})


def test_whether_the_bucket_is_missing_is_asked_once() -> None:
    with scripted(Say(404), error(404, "NoSuchKey"), Say(404)) as script:
        store = script.store()
        for _ in range(2):
            with pytest.raises(NotFound):
                store.size("a")
        assert len(script.asked) == 3


def test_a_bucket_of_another_region_is_asked_there() -> None:
    malformed = Say(
        400, b"<Error><Code>AuthorizationHeaderMalformed</Code><Region>eu-west-1</Region></Error>"
    )
    for refusal in (malformed, error(301, "PermanentRedirect", x_amz_bucket_region="eu-west-1")):
        with scripted(refusal, STORED, STORED) as script:
            store = script.store(client_kwargs={"region_name": "us-east-1"})
            store.write("a", [b"x"])
            store.write("b", [b"x"])
            regions = [a.headers["authorization"].split("/")[2] for a in script.asked]
        assert regions == ["us-east-1", "eu-west-1", "eu-west-1"]


@pytest.mark.parametrize(
    ("status", "location"),
    [
        (301, "http://127.0.0.1:{}/bucket/pre/a"),
        (302, "http://localhost:{}/"),
        (307, "http://u:p@127.0.0.1:{}/"),
        (308, "//127.0.0.1:{}/"),
    ],
)
def test_no_other_host_is_asked_whatever_location_says(status: int, location: str) -> None:
    with scripted(*[STORED] * 9) as there:
        elsewhere = location.format(there.endpoint.rpartition(":")[2])
        answers = [error(status, "", Location=elsewhere)] * 9
        with scripted(*answers) as here, pytest.raises(StoreError) as caught:
            here.store(patience=0).write("a", [b"x"])
        assert "no other host" in caught.value.hint
        assert not there.asked


@pytest.mark.parametrize("status", [400, 401, 403])
def test_credentials_that_ended_are_read_again_and_not_at_each_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr("ckptsync.stores.s3.client.SEARCH_EVERY", 3600.0)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))

    def expired(key: str) -> Say:
        """The answer to an old key; ``key`` is the new one."""
        more = "aws_secret_access_key = s\naws_session_token = t\n"
        (tmp_path / "credentials").write_text(f"[default]\naws_access_key_id = {key}\n{more}")
        return error(status, "ExpiredToken")

    expired("OLD")
    with scripted(lambda _: expired("NEW"), STORED, lambda _: expired("NEWER")) as script:
        store = script.store(key=None, secret=None)
        store.write("a", [b"x"])
        assert ["NEW" in a.headers["authorization"] for a in script.asked] == [False, True]
        with pytest.raises(StoreError, match="ExpiredToken") as caught:
            store.write("a", [b"x"])
    assert not isinstance(caught.value, Transient)
    assert "new credentials" in caught.value.hint


def test_no_secret_is_ever_told() -> None:
    leaky = (
        "<Error><Code>SignatureDoesNotMatch</Code><Message>no</Message><StringToSign>AKIDEXAMPLE"
        " verysecret</StringToSign></Error>"
    )
    with scripted(Say(403, leaky.encode())) as script, pytest.raises(ConfigError) as caught:
        script.store(token="sessiontoken").write("a", [b"x"])
    told = f"{caught.value!r} {caught.value.hint} {caught.value.__cause__!r}"
    for secret in ("AKIDEXAMPLE", "verysecret", "sessiontoken", "Signature="):
        assert secret not in told


LOGIN = Say(200, b"<html><body>please log in</body></html>")
MORE = "<ListBucketResult><IsTruncated>true</IsTruncated>{}</ListBucketResult>"
TOKEN = "<NextContinuationToken>t</NextContinuationToken>"
USES: dict[str, Callable[[S3Store], object]] = {
    "write": lambda store: store.write("a", [b"x"]),
    "size": lambda store: store.size("a"),
    "read": lambda store: store.read_into("a", 0, memoryview(bytearray(6))),
    "names": lambda store: list(store.names("")),
    "delete": lambda store: store.delete("a"),
}


@pytest.mark.parametrize(
    ("use", "answers", "kind", "words"),
    [
        ("write", [error(403, "AccessDenied")], StoreError, "s3://bucket/pre/a: permission denied"),
        ("write", [error(403, "RequestTimeTooSkewed")], StoreError, "set this machine's clock"),
        ("size", [Say(403), error(403, "InvalidAccessKeyId")], ConfigError, "InvalidAccessKeyId"),
        ("size", [Say(404), error(404, "NoSuchBucket")], ConfigError, "NoSuchBucket"),
        ("names", [Say(200, b"")], Transient, "not S3's"),
        ("names", [Say(200, b"   ")], Transient, "not S3's"),
        ("names", [Say(200, b"<html><body>please log in</html>")], Transient, "not S3's"),
        ("names", [LOGIN], Transient, "not S3's"),
        ("names", [Say(200, MORE.format("").encode())], Transient, "its listing"),
        ("names", [Say(200, MORE.format(TOKEN).encode())] * 2, Transient, "its listing"),
        ("write", [LOGIN], Transient, "no ETag"),
        (
            "read",
            [
                Say(206, b"old", {"Content-Range": "bytes 0-5/6", "ETag": '"1"'}, length=6),
                error(412, "PreconditionFailed"),
            ],
            StoreError,
            "replaced while it was read",
        ),
        (
            "delete",
            [Say(200, b"\n<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>")],
            Transient,
            "",
        ),
    ],
)
def test_an_answer_is_an_error_of_one_class_with_a_remedy_after_no_further_request(
    use: str, answers: list[Say], kind: type[CkptsyncError], words: str
) -> None:
    with scripted(*answers) as script, pytest.raises(kind) as caught:
        USES[use](script.store(patience=0 if kind is Transient else 30))
    assert len(script.asked) == len(answers)
    assert kind is Transient or not isinstance(caught.value, Transient)
    assert words in f"{caught.value}; {caught.value.hint}"


def test_a_range_with_status_200_is_a_range_if_it_says_so() -> None:
    with scripted(
        Say(200, b"3456", {"Content-Range": "bytes 3-6/10"}), Say(200, b"0123")
    ) as script:
        out = bytearray(4)
        script.store().read_into("a", 3, memoryview(out))
        assert out == b"3456"
        with pytest.raises(StoreError, match="ignores ranges"):
            script.store().read_into("a", 3, memoryview(out))


ROW = "<Contents><Key>pre/{}</Key><Size>{}</Size><LastModified>{}</LastModified></Contents>"
WHEN = "2026-11-21T10:48:36Z"
LAUGHS = (
    "<!DOCTYPE l [<!ENTITY a 'aaaaaaaaaa'>"
    + "".join(f"<!ENTITY {c} '{f'&{chr(ord(c) - 1)};' * 10}'>" for c in "bcdefghij")
    + "]>"
)
DIGITS = ["-1", "9" * 400, "9" * 5000, "\u00b2", "1.5"]


def listing(inner: str, declared: str = "", encoding: str = "utf-8") -> Say:
    text = f"{declared}<ListBucketResult><Name>bucket</Name>{inner}</ListBucketResult>"
    return Say(200, text.encode(encoding))


@pytest.mark.parametrize(
    "answer",
    [
        listing("&j;", f"<?xml version='1.0'?>{' ' * 2000}{LAUGHS}"),
        listing("&j;", f"<?xml version='1.0' encoding='utf-16'?>{LAUGHS}", "utf-16"),
        listing(
            "", f"<!--{'x' * 70_000}--><!DOCTYPE ListBucketResult SYSTEM 'file:///etc/passwd'>"
        ),
        listing("<a/>" * 1_000_000),
        listing("<a>" * 1_000_000),
        listing("<Contents>" * 800_000),
        listing(f"<Contents>{'<' * 2_000_000}</Contents>"),
        listing(f"<Contents>{'<a></a>' * 500_000}</Contents>"),
        Say(200, gzip.compress(bytes(1 << 20)), {"Content-Encoding": "gzip"}),
        Say(200, b"<Error><Code>InternalError</Code></Error>"),
        *(listing(ROW.format("a", digits, WHEN)) for digits in DIGITS),
        *(
            listing(ROW.format("a", 1, moment))
            for moment in ("yesterday", "2026-13-45T99:00:00Z", "9" * 5000)
        ),
    ],
)
def test_a_listing_that_is_nonsense_is_transient(answer: Say) -> None:
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with scripted(answer) as script, pytest.raises(Transient):
        list(script.store(patience=0).names(""))
    assert time.process_time() - start < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10, "KiB"


@pytest.mark.parametrize("size", [1 << 10, 1 << 20])
@pytest.mark.parametrize("status", [200, 400, 503])
def test_an_answer_without_an_end_is_ended(status: int, size: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with (
        scripted(Say(status, itertools.repeat(b"<ListBucketResult>".ljust(size)))) as script,
        pytest.raises(Transient),
    ):
        list(script.store(patience=0).names(""))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10, "KiB"


@pytest.mark.parametrize(
    "page",
    [
        lambda _: (ROW.format("a", 1, WHEN), "same"),
        lambda n: (ROW.format("a", 1, WHEN), f"token {n % 3}"),
        lambda n: (ROW.format("a", 1, WHEN), f"token {n}"),
        lambda n: ("<CommonPrefixes><Prefix>pre/a/</Prefix></CommonPrefixes>", f"token {n}"),
        lambda n: (ROW.format(n % 7, 1, WHEN), f"token {n}"),
        lambda n: ("", f"token {n}"),
        lambda n: (ROW.format(n, 1, WHEN), f"token {n}"),
    ],
)
def test_a_listing_without_an_end_is_ended(
    page: Callable[[int], tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptsync.stores.s3.requests.IDLE", 50)
    monkeypatch.setattr("ckptsync.stores.s3.requests.NAMES", 60)

    def say(asked: Asked) -> Say:
        rows, token = page(len(script.asked))
        return listing(
            f"{rows}<IsTruncated>true</IsTruncated><NextContinuationToken>{token}"
            "</NextContinuationToken>"
        )

    for listed in (lambda store: list(store.names("")), lambda store: store.dirs("")):
        with scripted(*[say] * 100) as script, pytest.raises(Transient, match="listing"):
            listed(script.store())


@pytest.mark.parametrize("digits", DIGITS)
def test_a_length_that_is_nonsense_is_transient(digits: str) -> None:
    with scripted(Say(200, b"", {"Content-Length": digits})) as script, pytest.raises(Transient):
        script.store(patience=0).size("a")


@pytest.mark.parametrize(
    "told",
    [
        *DIGITS,
        "Wed, 21 Oct 2015 07:28:00 +99999999999999999999",
        "Mon, 01 Jan 0001 00:00:00 -0000",
        "Fri, 31 Dec 9999 23:59:59 GMT",
    ],
)
def test_a_time_that_is_nonsense_is_as_if_it_were_not_said(told: str) -> None:
    with scripted(error(503, "SlowDown", Retry_After=told), FOUND) as script:
        assert script.store().size("a") == 3


@pytest.mark.parametrize(
    "told",
    [
        None,
        "",
        "bytes 1-3/6",
        "bytes 0-9/10",
        "bytes 0-1/6",
        "bytes 5-2/6",
        "bytes */6",
        "items 0-2/6",
        *(f"bytes 0-2/{digits}" for digits in DIGITS),
        "bytes -1-2/6",
        f"bytes 0-{'9' * 5000}/6",
    ],
)
def test_a_range_that_is_not_the_one_asked_for_is_transient(told: str | None) -> None:
    with (
        scripted(Say(206, b"abc", {} if told is None else {"Content-Range": told})) as script,
        pytest.raises(Transient, match="asked for bytes 0-2"),
    ):
        script.store(patience=0).read_into("a", 0, memoryview(bytearray(3)))


def begun(page: str = "<UploadId>u</UploadId>") -> str:
    return (
        f"<Upload><Key>pre/a</Key>{page}<Initiated>{WHEN}</Initiated><ChecksumAlgorithm>CRC32"
        "</ChecksumAlgorithm></Upload>"
    )


PART = "<Part><PartNumber>{}</PartNumber><Size>{}</Size><ETag>e</ETag></Part>"
ENDLESS = (
    "<IsTruncated>true</IsTruncated><NextKeyMarker>{0}</NextKeyMarker><NextPartNumberMarker>{0}"
    "</NextPartNumberMarker>"
)


@pytest.mark.parametrize(
    ("uploads", "parts"),
    [
        *((begun(), PART.format(digits, 5)) for digits in [*DIGITS, ""]),
        *((begun(), PART.format(1, digits)) for digits in [*DIGITS, ""]),
        (begun(), ENDLESS),
        (begun(), PART.format(1, 5) + ENDLESS),
        (begun(), "".join(PART.format(n, 5) for n in range(1, 900)) + ENDLESS),
        (ENDLESS, ""),
        (begun() + ENDLESS, ""),
        (begun(""), ""),
        ("", ""),
    ],
)
def test_unfinished_uploads_that_are_nonsense_are_transient(
    uploads: str, parts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of them: the upload that is begun has no identity.

    A request without one would be about the file itself.
    """
    monkeypatch.setattr("ckptsync.stores.s3.requests.IDLE", 50)

    def say(asked: Asked) -> Say:
        assert asked.method != "DELETE"
        if asked.method in ("HEAD", "PUT"):
            return Say(404)
        if asked.method == "POST":
            return Say(200, b"<InitiateMultipartUploadResult/>")
        name, inner = (
            ("ListMultipartUploads", uploads) if "uploads" in asked.query else ("ListParts", parts)
        )
        return Say(200, f"<{name}Result>{inner.format(len(script.asked))}</{name}Result>".encode())

    with scripted(*[say] * 100) as script:
        store = script.store(patience=0)
        store.least = 5 << 20
        with pytest.raises(Transient, match="not S3's"):
            store.create("a", [bytes(6 << 20)] * 2, About(size=12 << 20, origin="o"))
