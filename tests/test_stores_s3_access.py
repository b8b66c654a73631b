"""What options, environment and profiles say, as botocore and s3fs understand them.  Nothing is asked over a network."""

from __future__ import annotations

import base64
import hashlib
import ssl
from pathlib import Path
from typing import Any

import pytest
from fsspec.config import conf

from ckptsync.errors import ConfigError, Unsupported
from ckptsync.stores.s3.access import Access, Place
from ckptsync.stores.s3.signing import Keys
from ckptsync.stores.urls import Remote

MINE = {"key": "AKID", "secret": "verysecret"}


@pytest.fixture(autouse=True)
def _nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (
        "AWS_PROFILE",
        "AWS_ENDPOINT_URL",
        "AWS_ENDPOINT_URL_S3",
        "AWS_REGION",
        "AWS_DEFAULT_REGION",
        "AWS_CA_BUNDLE",
        "HTTPS_PROXY",
    ):
        monkeypatch.delenv(name, raising=False)
    for name in (
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "HTTP_PROXY",
        "http_proxy",
        "https_proxy",
        "NO_PROXY",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))


def access(rest: str = "bucket/a/b", **options: Any) -> Access:
    return Access(Remote("s3", rest), {**MINE, **options})


@pytest.mark.parametrize(
    ("options", "host", "root", "region"),
    [
        ({}, "bucket.s3.amazonaws.com", "/", "us-east-1"),
        ({"client_kwargs": {"region_name": "eu-west-1"}}, "bucket.s3.eu-west-1.amazonaws.com", "/", "eu-west-1"),
        ({"endpoint_url": "http://minio:9000"}, "minio:9000", "/bucket/", "us-east-1"),
        ({"client_kwargs": {"endpoint_url": "http://minio:9000", "region_name": "home"}}, "minio:9000", "/bucket/", "home"),
        ({"endpoint_url": "https://s3.example", "config_kwargs": {"s3": {"addressing_style": "virtual"}}}, "bucket.s3.example", "/", "us-east-1"),
        ({"config_kwargs": {"s3": {"addressing_style": "path"}}}, "s3.amazonaws.com", "/bucket/", "us-east-1"),
        ({"config_kwargs": {"use_dualstack_endpoint": True, "region_name": "eu-west-1"}}, "bucket.s3.dualstack.eu-west-1.amazonaws.com", "/", "eu-west-1"),
        ({"config_kwargs": {"use_fips_endpoint": True, "region_name": "us-east-2"}}, "bucket.s3-fips.us-east-2.amazonaws.com", "/", "us-east-2"),
    ],
)  # fmt: skip
def test_a_bucket_is_where_botocore_says(options: dict[str, Any], host: str, root: str, region: str) -> None:
    found = access(**options).place
    assert (found.host, found.root, found.region) == (host, root, region)
    assert found.is_aws is host.endswith(".amazonaws.com")


def test_the_environment_and_profiles_are_obeyed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config").write_text(
        "[profile lab]\nregion = lab-1\nservices = ours\naws_access_key_id = FROMPROFILE\naws_secret_access_key = s\n"
        "[services ours]\ns3 =\n  endpoint_url = http://lab.example:1234\n"
    )
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://env.example")
    assert access().place == Place(is_tls=True, host="env.example", root="/bucket/", region="us-east-1")
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    found = Access(Remote("s3", "bucket"), {"profile": "lab"})
    assert found.place == Place(is_tls=False, host="lab.example:1234", root="/bucket/", region="lab-1")
    assert found.keys() == Keys("FROMPROFILE", "s")
    monkeypatch.setenv("AWS_PROFILE", "lab")
    assert Access(Remote("s3", "bucket"), {}).place.host == "lab.example:1234"


def test_options_of_fsspecs_own_configuration_count_less_than_those_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(conf, "s3", {"endpoint_url": "http://conf.example", "key": "CONF", "secret": "s"})
    assert Access(Remote("s3", "bucket"), {}).place.host == "conf.example"
    assert access().keys() == Keys("AKID", "verysecret")


def test_a_url_has_a_bucket_and_a_prefix() -> None:
    for rest, bucket, prefix in [("b", "b", ""), ("bkt/a", "bkt", "a/"), ("bkt/a b/c", "bkt", "a b/c/")]:
        found = Access(Remote("s3", rest), {**MINE, "endpoint_url": "http://h"})
        assert (found.bucket, found.prefix) == (bucket, prefix)
    arn = "arn:aws:s3:eu-west-1:123456789012:accesspoint/mine"
    found = access(f"{arn}/a/b")
    assert (found.bucket, found.prefix, found.place.region) == (arn, "a/b/", "eu-west-1")
    assert found.place.host == "mine-123456789012.s3-accesspoint.eu-west-1.amazonaws.com"


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
        ("bucket", {"config_kwargs": {"signature_version": "s3"}}, "signature_version"),
        ("bucket", {"client_kwargs": {"verify": "/no/such/bundle"}}, "certificates"),
        ("Not A Bucket", {}, "Not A Bucket"),
    ],
)
def test_nonsense_is_a_configuration_error_without_secrets(rest: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        access(rest, **options).context()
    assert "verysecret" not in f"{caught.value!r}{caught.value.hint}"


def test_without_credentials_it_is_said_where_they_may_come_from() -> None:
    with pytest.raises(ConfigError, match="no credentials") as caught:
        Access(Remote("s3", "bucket"), {})
    assert "AWS_PROFILE" in caught.value.hint
    assert Access(Remote("s3", "bucket"), {"anon": True}).keys() is None


def test_directory_buckets_are_unsupported() -> None:
    with pytest.raises(Unsupported, match="directory buckets"):
        access("bkt--use1-az4--x-s3/a")


def test_encryption_and_payers_are_said_where_s3_wants_to_hear_it() -> None:
    found = access(
        requester_pays=True,
        s3_additional_kwargs={
            "ServerSideEncryption": "aws:kms",
            "SSEKMSKeyId": "k",
            "Metadata": {"a": "b"},
            "ChecksumAlgorithm": "SHA256",
        },
    )
    put = {k.lower(): v for k, v in found.headers("PutObject").items()}
    assert put == {
        "x-amz-server-side-encryption": "aws:kms",
        "x-amz-server-side-encryption-aws-kms-key-id": "k",
        "x-amz-meta-a": "b",
        "x-amz-request-payer": "requester",
    }
    assert {k.lower() for k in found.headers("CreateMultipartUpload")} == set(put)
    assert found.headers("UploadPart") == found.headers("ListParts") == {"x-amz-request-payer": "requester"}


def test_a_customers_key_goes_with_every_request_that_needs_it() -> None:
    key = "k" * 32
    found = access(s3_additional_kwargs={"SSECustomerAlgorithm": "AES256", "SSECustomerKey": key})
    for operation in ("PutObject", "UploadPart", "GetObject", "HeadObject"):
        headers = {name.lower(): v for name, v in found.headers(operation).items()}
        assert headers["x-amz-server-side-encryption-customer-key"] == base64.b64encode(key.encode()).decode()
        assert (
            headers["x-amz-server-side-encryption-customer-key-md5"]
            == base64.b64encode(hashlib.md5(key.encode()).digest()).decode()
        )


def test_a_payload_is_signed_where_nothing_else_protects_it() -> None:
    assert access(endpoint_url="http://h").signs_payload
    assert not access().signs_payload
    assert not access(endpoint_url="http://h", config_kwargs={"s3": {"payload_signing_enabled": False}}).signs_payload
    assert access(config_kwargs={"s3": {"payload_signing_enabled": True}}).signs_payload
    assert not access(config_kwargs={"request_checksum_calculation": "when_required"}).knows_checksums


def test_certificates_and_proxies_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert access(endpoint_url="http://h").context() is None
    unchecked = access(client_kwargs={"verify": False}).context()
    assert unchecked is not None
    assert unchecked.verify_mode == ssl.CERT_NONE
    monkeypatch.setenv("AWS_CA_BUNDLE", "/no/such/bundle")
    with pytest.raises(ConfigError, match="certificates"):
        access().context()
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    assert access().proxy() == "http://proxy:3128"
    assert access(endpoint_url="http://h").proxy() == ""
    monkeypatch.setenv("NO_PROXY", "amazonaws.com")
    assert access().proxy() == ""
    assert access(config_kwargs={"proxies": {"https": "http://other:1"}}).proxy() == "http://other:1"
