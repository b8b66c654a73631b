"""The options of a store on S3: what s3fs takes, of which some is for s3fs alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptsync.errors import ConfigError

KEYS = {"key": "aws_access_key_id", "secret": "aws_secret_access_key", "token": "aws_session_token"}
_OURS = frozenset(
    {*KEYS, "username", "password", "anon", "endpoint_url", "use_ssl", "client_kwargs", "config_kwargs", "profile"}
    | {"requester_pays", "s3_additional_kwargs"}
)
_S3FS_ONLY = frozenset(  # what s3fs has for its own caches and event loop
    "default_block_size default_fill_cache default_cache_type version_aware cache_regions max_concurrency fixed_upload_size local_expiry_check".split()  # noqa: SIM905
    + "use_listings_cache listings_expiry_time max_paths retries skip_instance_cache asynchronous loop session protocol".split()  # noqa: SIM905
)


def configured(protocol: str) -> dict[str, Any]:
    """What fsspec is told of it by variables, files, or the program; importing it takes as long as ten small files.

    Source: filesystem-spec.readthedocs.io, "Configuration".
    """
    folder = os.environ.get("FSSPEC_CONFIG_DIR") or Path.home() / ".config" / "fsspec"
    if "fsspec" not in sys.modules and not any(name.startswith("FSSPEC_") for name in os.environ) and not Path(folder).is_dir():
        return {}
    from fsspec.config import conf  # noqa: PLC0415

    return dict(conf.get(protocol, {}))


def check(url: str, options: Mapping[str, Any]) -> None:
    """Raises ConfigError for what s3fs does not know."""
    if unknown := sorted(set(options) - _OURS - _S3FS_ONLY):
        raise ConfigError(
            f"{url}: storage_options has {', '.join(unknown)}, which s3fs has not", hint=f"known are {', '.join(sorted(_OURS))}"
        )
    for name in ("client_kwargs", "config_kwargs", "s3_additional_kwargs"):
        if not isinstance(options.get(name) or {}, Mapping):
            raise ConfigError(f"{url}: storage_options: {name} is {type(options[name]).__name__}, a mapping wanted")
