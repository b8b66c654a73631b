from __future__ import annotations

from pathlib import Path

import pytest

from ckptsync.errors import ConfigError, Unsupported
from ckptsync.stores.urls import Remote, located, path_of


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("s3://bucket/runs/", Remote("s3", "bucket/runs")),
        ("S3A://bucket", Remote("s3", "bucket")),
        ("sftp://me@host:2222//srv/store", Remote("sftp", "me@host:2222//srv/store")),
        (
            "s3://arn:aws:s3:eu-west-1:1:accesspoint/mine/runs",
            Remote("s3", "arn:aws:s3:eu-west-1:1:accesspoint/mine/runs"),
        ),
        ("ssh://host/srv", Remote("sftp", "host/srv")),
        ("sftp://me@[::1]:22/srv", Remote("sftp", "me@[::1]:22/srv")),
        ("gs://bucket/a b", Remote("gs", "bucket/a b")),
        ("file:///srv/my%20store", Path("/srv/my store")),
        ("/srv/s3:x", Path("/srv/s3:x")),
    ],
)
def test_a_url_is_a_place_elsewhere_and_a_path_is_here(url: str, wanted: Path | Remote) -> None:
    assert located(url) == wanted


def test_a_place_elsewhere_is_written_as_it_was_read() -> None:
    assert located(Remote("s3", "bucket/runs").url) == Remote("s3", "bucket/runs")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "s3://",
        "s3:///",
        "s3:/bucket",
        "host:/path",
        "file://host/path",
        "s3://bucket/a\nb",
        "a\0b",
    ],
)
def test_what_names_no_place_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        located(url)


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIA:hunter2@bucket/x",
        "s3://AKIA:hunter2/more@bucket/x",
        "sftp://me:hunter2@host/srv",
        "webdav://me:hunter2@host/srv",
        "webdav://me:hunter2/more@host/srv",
    ],
)
def test_a_password_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match="a password in it") as caught:
        located(url)
    assert "hunter2" not in f"{caught.value}{caught.value.hint}"


def test_where_a_path_is_needed_another_scheme_is_refused() -> None:
    assert path_of("/srv") == "/srv"
    with pytest.raises(Unsupported, match="s3://bucket"):
        path_of("s3://bucket")
