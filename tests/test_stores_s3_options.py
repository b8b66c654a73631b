"""What may be said of a store on S3, and where it is looked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ckptsync.errors import ConfigError
from ckptsync.stores.s3.options import check, configured

ASKED = "from ckptsync.stores.s3.options import configured; import sys; print(configured('s3'), 'fsspec' in sys.modules)"


def asked(**environment: str) -> str:
    """By a process that has not met fsspec yet."""
    given = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "PYTHONPATH": ":".join(sys.path), **environment}
    return subprocess.run([sys.executable, "-c", ASKED], env=given, check=True, capture_output=True, text=True).stdout.strip()


def test_fsspec_is_not_imported_where_it_has_nothing_to_say() -> None:
    assert asked() == "{} False"


def test_fsspecs_variables_and_files_count(tmp_path: Path) -> None:
    assert asked(FSSPEC_S3_KEY="A") == "{'key': 'A'} True"
    (tmp_path / "conf.json").write_text(json.dumps({"s3": {"key": "B"}}))
    assert asked(FSSPEC_CONFIG_DIR=str(tmp_path)) == "{'key': 'B'} True"
    home = tmp_path / ".config" / "fsspec"
    home.mkdir(parents=True)
    (tmp_path / "conf.json").rename(home / "conf.json")
    assert asked(HOME=str(tmp_path)) == "{'key': 'B'} True"


def test_what_the_program_told_fsspec_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    config = pytest.importorskip("fsspec.config")
    monkeypatch.setitem(config.conf, "s3", {"key": "C"})
    assert configured("s3") == {"key": "C"}


def test_options_that_s3fs_has_not_are_named() -> None:
    check("s3://b", {"key": "x", "client_kwargs": {}, "use_listings_cache": False})
    with pytest.raises(ConfigError, match="kye"):
        check("s3://b", {"kye": "x"})
    with pytest.raises(ConfigError, match="a mapping wanted"):
        check("s3://b", {"config_kwargs": "x"})
