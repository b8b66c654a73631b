"""What options, environment and profiles say, as botocore and s3fs understand them."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from ckptsync.errors import ConfigError, Unsupported
from ckptsync.stores.s3.client import BucketAccess
from ckptsync.stores.s3.store import S3Store
from ckptsync.stores.urls import Remote
from tests.support.scripted_s3 import Asked, Say, scripted

STORED = Say(200, b"", {"ETag": '"t"'})

MINE = {"key": "AKID", "secret": "verysecret"}


@pytest.fixture(autouse=True)
def _nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [*os.environ]:
        if name.startswith("AWS_") or name.lower() in ("http_proxy", "https_proxy", "no_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))


def access(rest: str = "bucket/a/b", **options: Any) -> BucketAccess:
    return BucketAccess(Remote("s3", rest), {**MINE, **options})


def endpoint(found: BucketAccess) -> str:
    """The URL of a request."""
    seen: list[str] = []

    def keep(request: Any, **_: Any) -> Any:
        seen.append(request.url)
        raise ConnectionAbortedError

    found.client.meta.events.register_first("before-send.s3", keep)
    with contextlib.suppress(ConnectionAbortedError):
        found.client.head_object(Bucket=found.bucket, Key="K")
    return seen[0]


@pytest.mark.parametrize(
    ("options", "root", "region"),
    [
        ({}, "https://bucket.s3.amazonaws.com/", "us-east-1"),
        ({"client_kwargs": {"region_name": "eu-west-1"}},
        "https://bucket.s3.eu-west-1.amazonaws.com/", "eu-west-1"),
        ({"endpoint_url": "http://minio:9000"}, "http://minio:9000/bucket/", "us-east-1"),
        ({"client_kwargs": {"endpoint_url": "http://minio:9000", "region_name": "home"}},
        "http://minio:9000/bucket/", "home"),
        ({"endpoint_url": "https://s3.example",
        "config_kwargs": {"s3": {"addressing_style": "virtual"}}}, "https://bucket.s3.example/",
        "us-east-1"),
    ],
)  # fmt: skip
def test_a_bucket_is_where_botocore_says(options: dict[str, Any], root: str, region: str) -> None:
    found = access(**options)
    assert endpoint(found) == f"{root}K"
    assert found.is_aws is ("amazonaws" in root)
    assert found.client.meta.region_name in (region, "aws-global")


def test_the_environment_and_profiles_are_obeyed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    profile = "region = lab-1\nservices = ours\naws_access_key_id = FROMPROFILE\n"
    profile += "aws_secret_access_key = s\n"
    services = "[services ours]\ns3 =\n  endpoint_url = http://lab.example:1234\n"
    (tmp_path / "config").write_text(f"[profile lab]\n{profile}{services}")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://env.example")
    assert endpoint(access()) == "https://env.example/bucket/K"
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    found = BucketAccess(Remote("s3", "bucket"), {"profile": "lab"})
    assert endpoint(found) == "http://lab.example:1234/bucket/K"
    assert found.client.meta.region_name == "lab-1"
    assert found.keys()[:2] == ("FROMPROFILE", "s")
    monkeypatch.setenv("AWS_PROFILE", "lab")
    found = BucketAccess(Remote("s3", "bucket"), {})
    assert endpoint(found) == "http://lab.example:1234/bucket/K"


def test_a_url_has_a_bucket_and_a_prefix() -> None:
    for rest, prefix in (("bkt", ""), ("bkt/a", "a/"), ("bkt/a b/c", "a b/c/")):
        found = access(rest, endpoint_url="http://h")
        assert (found.bucket, found.prefix) == ("bkt", prefix)
    arn = "arn:aws:s3:eu-west-1:123456789012:accesspoint/mine"
    found = access(f"{arn}/a/b")
    assert (found.bucket, found.prefix) == (arn, "a/b/")
    host = "mine-123456789012.s3-accesspoint.eu-west-1.amazonaws.com"
    assert endpoint(found) == f"https://{host}/K"


@pytest.mark.parametrize(
    ("rest", "options", "words"),
    [
        ("bucket/../x", {}, "plain path"),
        ("bucket//x", {}, "plain path"),
        ("bucket", {"kye": "x"}, "kye"),
        ("bucket", {"client_kwargs": "x"}, "mapping"),
        ("bucket", {"client_kwargs": {"regoin": "x"}}, "regoin"),
        ("bucket", {"config_kwargs": {"no_such": 1}}, "no_such"),
        ("bucket", {"profile": "nobody"}, "nobody"),
        ("bucket", {"endpoint_url": "no url"}, "no url"),
        ("bucket", {"endpoint_url": "http://me:verysecret@h"}, "a user or a password in it"),
        ("bucket", {"config_kwargs": {"signature_version": "s3"}}, "signature_version"),
        ("bucket", {"s3_additional_kwargs": {"Metadata": "x"}}, "Metadata"),
    ],
)
def test_nonsense_is_a_configuration_error_without_secrets(
    rest: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        access(rest, **options).extra_parameters("put_object")
    assert "verysecret" not in f"{caught.value!r}{caught.value.hint}"


def test_a_bucket_that_can_be_none_or_is_of_directories_is_refused() -> None:
    with pytest.raises(ConfigError, match="Not A Bucket"):
        S3Store(Remote("s3", "Not A Bucket"), MINE).size("a")
    with pytest.raises(Unsupported, match="directory buckets"):
        access("bkt--use1-az4--x-s3/a")


def test_without_credentials_it_is_said_where_they_may_come_from() -> None:
    with pytest.raises(ConfigError, match="no credentials") as caught:
        BucketAccess(Remote("s3", "bucket"), {})
    assert "AWS_PROFILE" in caught.value.hint
    assert BucketAccess(Remote("s3", "bucket"), {"anon": True}).keys() is None


def sent(put: int = 1, **options: Any) -> list[Asked]:
    """What a server is told for a small file that is written and read."""
    with scripted(*[STORED] * put, Say(200, b"x", {"Content-Range": "bytes 0-0/1"})) as script:
        store = script.store(**options)
        store.write("a", [b"x"])
        store.read_into("a", 0, memoryview(bytearray(1)))
        return script.asked


def test_encryption_and_payers_are_said_where_s3_wants_to_hear_it() -> None:
    given = {
        "ServerSideEncryption": "aws:kms",
        "SSEKMSKeyId": "k",
        "Metadata": {"a": "b"},
        "ChecksumAlgorithm": "SHA256",
    }
    put, get = sent(requester_pays=True, s3_additional_kwargs=given)
    assert put.headers["x-amz-server-side-encryption"] == "aws:kms"
    assert put.headers["x-amz-server-side-encryption-aws-kms-key-id"] == "k"
    assert put.headers["x-amz-meta-a"] == "b"
    assert put.headers["x-amz-request-payer"] == get.headers["x-amz-request-payer"] == "requester"
    assert "x-amz-server-side-encryption" not in get.headers


def test_a_payload_is_signed_where_nothing_else_protects_it() -> None:
    unsigned: dict[str, Any] = {"s3": {"payload_signing_enabled": False}}
    assert sent()[0].headers["x-amz-content-sha256"] == hashlib.sha256(b"x").hexdigest()
    assert sent(2, config_kwargs=unsigned)[0].headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
    assert not access().signs_payload
    assert access(config_kwargs={"s3": {"payload_signing_enabled": True}}).signs_payload
    assert "x-amz-checksum-crc32" in sent()[0].headers
    required = {"request_checksum_calculation": "when_required"}
    assert "content-md5" in sent(config_kwargs=required)[0].headers


def test_nothing_waits_for_a_server_to_say_continue() -> None:
    assert "expect" not in sent()[0].headers
    assert "ckptsync/" in sent()[0].headers["user-agent"]
