"""docs/s3.md and docs/places/s3-compatible.md: their configurations load; the options of the first
are the ones that are known, its files are there.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from ckptsync.config.schema import KEYS
from ckptsync.stores.s3.client import BucketAccess
from ckptsync.stores.sftp.connection import OPTIONS as SFTP_OPTIONS
from ckptsync.stores.urls import Remote, located

DOCS = Path(__file__).parent.parent / "docs"
TEXT = (DOCS / "s3.md").read_text()
CONFIGURATIONS = re.findall(
    r"```yaml\n(.*?)```", TEXT + (DOCS / "places" / "s3-compatible.md").read_text(), re.DOTALL
)
OPTIONS = [
    o
    for row in TEXT.partition("## Options")[0].splitlines()
    for o in re.findall(r"`(\w+: [^`]*)`", row.rpartition("|")[0].rpartition("|")[2])
]


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config").write_text(
        "[profile training]\n"
        "aws_access_key_id = a\n"
        "aws_secret_access_key = b\n"
        "region = eu-central-1\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")


def reached(url: str, options: object) -> BucketAccess:
    place = located(url)
    assert isinstance(place, Remote)
    return BucketAccess(place, KEYS["store.options"].read(options))


@pytest.mark.parametrize("text", CONFIGURATIONS)
def test_a_configuration_reaches_a_bucket(text: str) -> None:
    store = yaml.safe_load(text)["store"]
    assert reached(store["url"], store["options"]).bucket.startswith("bucket")


def test_the_table_has_options() -> None:
    assert len(CONFIGURATIONS) == 5
    assert len(OPTIONS) >= 9


@pytest.mark.parametrize("option", [o for o in OPTIONS if "…" not in o])
def test_an_option_of_the_table_is_taken(option: str) -> None:
    assert reached("s3://bucket/checkpoints", yaml.safe_load(option)).bucket


def test_the_options_of_ssh_are_those_that_are_known() -> None:
    row = next(line for line in TEXT.splitlines() if line.startswith("| `sftp://`"))
    assert set(re.findall(r"`(\w+)`", row.split("|")[2])) == set(SFTP_OPTIONS)
