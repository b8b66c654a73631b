"""What is learnt from a refusal, with a server that says what the test wants."""

from __future__ import annotations

import calendar
import email.utils
import time
from pathlib import Path

import pytest

from ckptsync.errors import ConfigError, NotFound, StoreError, Transient
from ckptsync.stores.contract import read_all
from ckptsync.stores.s3.store import S3Store
from ckptsync.stores.urls import Remote
from tests.s3_script import Asked, Say, error, scripted

FOUND = Say(200, b"x" * 3)

STORED = Say(200, b"", {"ETag": '"t"'})


def test_a_busy_server_is_asked_again_when_it_says() -> None:
    with scripted(error(503, "SlowDown", Retry_After="0"), error(500, "InternalError"), FOUND) as script:
        assert script.store().size("a") == 3
        assert [a.key for a in script.asked] == ["pre/a"] * 3


def test_a_refusal_is_not_repeated() -> None:
    with scripted(*[error(403, "AccessDenied")] * 9) as script:
        with pytest.raises(StoreError, match="s3://bucket/pre/a: permission denied") as caught:
            script.store().write("a", [b"x"])
        assert len(script.asked) == 1
        assert "s3:PutObject" in caught.value.hint


def test_why_a_head_is_refused_is_asked_for() -> None:
    with scripted(Say(403), error(403, "InvalidAccessKeyId")) as script, pytest.raises(ConfigError, match="InvalidAccessKeyId"):
        script.store().size("a")


def test_a_missing_bucket_is_no_missing_file() -> None:
    with scripted(Say(404), error(404, "NoSuchBucket")) as script, pytest.raises(ConfigError, match="NoSuchBucket"):
        script.store().size("a")
    with scripted(Say(404), error(404, "NoSuchKey"), Say(404)) as script:
        store = script.store()
        for _ in range(2):
            with pytest.raises(NotFound):
                store.size("a")
        assert len(script.asked) == 3, "it is asked once"


def test_a_clock_that_is_wrong_is_corrected_by_the_servers(caplog: pytest.LogCaptureFixture) -> None:
    ahead = time.time() + 7200
    refusal = error(403, "RequestTimeTooSkewed", Date=email.utils.formatdate(ahead, usegmt=True))
    with scripted(refusal, STORED) as script:
        script.store().write("a", [b"x"])
        first, second = (a.headers["x-amz-date"] for a in script.asked)
    assert time.strptime(second, "%Y%m%dT%H%M%SZ") > time.strptime(first, "%Y%m%dT%H%M%SZ")
    assert abs(calendar.timegm(time.strptime(second, "%Y%m%dT%H%M%SZ")) - ahead) < 60
    assert "s behind that of 127.0.0.1" in caplog.text


def test_a_clock_that_agrees_and_is_refused_all_the_same_is_an_error() -> None:
    with scripted(*[error(403, "RequestTimeTooSkewed")] * 9) as script:
        with pytest.raises(StoreError, match="Skewed"):
            script.store().write("a", [b"x"])
        assert len(script.asked) == 1


def test_a_bucket_of_another_region_is_asked_there() -> None:
    malformed = Say(400, b"<Error><Code>AuthorizationHeaderMalformed</Code><Region>eu-west-1</Region></Error>")
    for refusal in (malformed, error(301, "PermanentRedirect", x_amz_bucket_region="eu-west-1")):
        with scripted(refusal, STORED, STORED) as script:
            store = script.store(client_kwargs={"region_name": "us-east-1"})
            store.write("a", [b"x"])
            store.write("b", [b"x"])
            regions = [a.headers["authorization"].split("/")[2] for a in script.asked]
        assert regions == ["us-east-1", "eu-west-1", "eu-west-1"]


def test_a_redirect_for_the_moment_is_followed() -> None:
    with scripted(STORED) as there, scripted(error(307, "TemporaryRedirect", Location=there.endpoint + "/bucket/pre/a")) as here:
        here.store().write("a", [b"x"])
        assert [a.key for a in there.asked] == ["pre/a"]


def test_credentials_that_ended_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = tmp_path / "credentials"
    text = "[default]\naws_access_key_id = {0}\naws_secret_access_key = s\naws_session_token = t\n"
    shared.write_text(text.format("OLD"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(shared))

    def expired(_: Asked) -> Say:
        shared.write_text(text.format("NEW"))
        return error(400, "ExpiredToken")

    with scripted(expired, STORED, error(400, "ExpiredToken")) as script:
        store = script.store(key=None, secret=None)
        store.write("a", [b"x"])
        assert ["NEW" in a.headers["authorization"] for a in script.asked] == [False, True]
        with pytest.raises(StoreError, match="ExpiredToken") as caught:
            store.write("a", [b"x"])
    assert not isinstance(caught.value, Transient)
    assert "new credentials" in caught.value.hint


def test_no_secret_is_ever_told() -> None:
    leaky = (
        "<Error><Code>SignatureDoesNotMatch</Code><Message>no</Message><StringToSign>AKIDEXAMPLE verysecret</StringToSign></Error>"
    )
    with scripted(Say(403, leaky.encode())) as script, pytest.raises(ConfigError) as caught:
        script.store(token="sessiontoken").write("a", [b"x"])
    told = f"{caught.value!r} {caught.value.hint} {caught.value.__cause__!r}"
    assert not any(word in told for word in ("AKIDEXAMPLE", "verysecret", "sessiontoken", "Signature="))


def test_a_completion_that_says_200_and_means_500_is_tried_again() -> None:
    with scripted(Say(200, b"x" * 3, {"Content-Range": "bytes 0-2/3"})) as script:
        out = bytearray(3)
        script.store().read_into("a", 0, memoryview(out))
        assert out == b"xxx"
        assert script.asked[0].headers["range"] == "bytes=0-2"


@pytest.mark.parametrize("page", [b"", b"   ", b"<html><body>please log in</html>", b"<html><body>please log in</body></html>"])
def test_a_page_of_a_proxy_is_no_listing(page: bytes) -> None:
    with scripted(Say(200, page)) as script, pytest.raises(Transient, match="not S3's"):
        list(script.store(patience=0).names(""))


def test_a_page_of_a_proxy_has_stored_nothing() -> None:
    page = Say(200, b"<html><body>please log in</body></html>")
    for secure in (True, False):
        with scripted(page) as script, pytest.raises(Transient, match="no ETag"):
            script.store(patience=0, config_kwargs={"s3": {"payload_signing_enabled": secure}}).write("a", [b"x"])


def test_a_listing_that_goes_on_and_does_not_say_where_is_an_error() -> None:
    again = Say(
        200, b"<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken></ListBucketResult>"
    )
    nowhere = Say(200, b"<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>")
    for answers in ([nowhere], [again, again]):
        with scripted(*answers) as script, pytest.raises(StoreError, match="goes on"):
            list(script.store().names(""))


def test_a_range_with_status_200_is_a_range_if_it_says_so() -> None:
    with scripted(Say(200, b"3456", {"Content-Range": "bytes 3-6/10"}), Say(200, b"0123")) as script:
        out = bytearray(4)
        script.store().read_into("a", 3, memoryview(out))
        assert out == b"3456"
        with pytest.raises(StoreError, match="ignores ranges"):
            script.store().read_into("a", 3, memoryview(out))


def test_a_file_that_is_replaced_while_it_is_read_is_read_anew() -> None:
    cut = Say(206, b"old", {"Content-Range": "bytes 0-5/6", "ETag": '"1"'}, length=6)
    new = Say(206, b"newnew", {"Content-Range": "bytes 0-5/6", "ETag": '"2"'})
    with scripted(cut, error(412, "PreconditionFailed"), new) as script:
        out = bytearray(6)
        script.store().read_into("a", 0, memoryview(out))
        assert out == b"newnew"
        assert [a.headers.get("if-match") for a in script.asked] == [None, '"1"', None]


def test_a_password_in_an_endpoint_is_refused_and_not_told() -> None:
    with pytest.raises(ConfigError, match="endpoint_url") as caught:
        S3Store(Remote("s3", "bucket"), {"key": "k", "secret": "s", "endpoint_url": "http://user:PASSWORD99@127.0.0.1:9"})
    assert "PASSWORD99" not in f"{caught.value} {caught.value.hint}"


def test_a_file_that_is_shorter_than_its_head_said_is_read_again() -> None:
    with scripted(
        FOUND, Say(206, b"x", {"Content-Range": "bytes 0-2/3"}, 3), Say(206, b"yz", {"Content-Range": "bytes 1-2/3"})
    ) as script:
        assert read_all(script.store(), "a") == b"xyz"
        assert [a.headers.get("range") for a in script.asked] == [None, "bytes=0-2", "bytes=1-2"], "from where it broke"
