"""Make botocore's client from a URL and s3fs's options, and make it anew when credentials or the process change.

botocore finds endpoints, profiles, credentials, certificates and proxies, in the same places as for s3fs and boto3.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote, urlsplit

from ckptsync import __version__
from ckptsync.errors import ConfigError, Corrupt, Unsupported
from ckptsync.paths import checked_path
from ckptsync.stores.limits import Limits
from ckptsync.stores.s3.transport import Transport
from ckptsync.stores.urls import Remote

try:
    import botocore.auth
    import botocore.config
    import botocore.exceptions
    import botocore.loaders
    import botocore.session
    import botocore.validate
    from botocore import UNSIGNED
    from botocore.awsrequest import AWSResponse
except ImportError as e:
    raise ConfigError(f"s3:// stores need a library that is not here: {e}", hint="pip install 'ckptsync[s3]'") from e

LOOK_EVERY = 5.0  # seconds between two searches for credentials
CONNECTIONS = 64  # idle connections that are kept
KEYS = {"key": "aws_access_key_id", "secret": "aws_secret_access_key", "token": "aws_session_token"}
_OURS = frozenset(
    {*KEYS, "username", "password", "anon", "endpoint_url", "use_ssl", "client_kwargs", "config_kwargs", "profile"}
    | {"requester_pays", "s3_additional_kwargs"}
)
_S3FS_ONLY = frozenset(  # options of s3fs's own caches and event loop
    "default_block_size default_fill_cache default_cache_type version_aware cache_regions max_concurrency fixed_upload_size local_expiry_check".split()  # noqa: SIM905
    + "use_listings_cache listings_expiry_time max_paths retries skip_instance_cache asynchronous loop session protocol".split()  # noqa: SIM905
)
_NOT_ADDITIONAL = frozenset(
    "Bucket Key Body ContentLength ContentMD5 IfMatch IfNoneMatch Range UploadId PartNumber MultipartUpload MpuObjectSize Prefix".split()  # noqa: SIM905
)
_ARN = re.compile(r"(arn:[^:/]+:s3[^:/]*:[^:/]*:[^:/]*:accesspoint[/:][^/:]+)(?:/(.*))?", re.DOTALL)
_SKEWED = "ckptsync-s3v4"


class Access:
    """A bucket, the prefix of a store in it, and a client to reach it. Threads and forked processes may share it.

    ``prefix`` is "" or ends in a slash. ``root`` is the URL before a key. ``takes_crc``: the options do not switch
    off the newer checksums. ``signs_payload``: a request's SHA-256 protects its body.
    """

    def __init__(self, remote: Remote, options: Mapping[str, Any], limits: Limits | None = None) -> None:
        self.url = remote.url
        self.bucket, self.prefix = _split(remote)
        self._options = {**configured("s3"), **configured("s3a"), **options}
        check_options(self.url, self._options)
        self._limits = limits or Limits()
        self._lock = threading.Lock()
        self._look_at = self._skew = 0.0
        self._additional: dict[str, dict[str, Any]] = {}
        with self.configuring():
            self._client = self._made()
            config = self._client.meta.config
            self.takes_crc: bool = config.request_checksum_calculation != "when_required"
            self.root = _prepared(self._client, self.bucket).url.removesuffix("K")
        if "@" in urlsplit(self.root).netloc:
            raise ConfigError(
                f"{self.url}: endpoint_url has a user or a password in it, which are no credentials for S3", hint="take them out"
            )
        signs = (config.s3 or {}).get("payload_signing_enabled")
        signs = not self.root.startswith("https:") if signs is None else bool(signs)
        self.signs_payload: bool = signs and not self._options.get("anon")
        self._ours(self._client)
        self._pid = os.getpid()

    @property
    def is_aws(self) -> bool:
        """Whether Amazon serves the bucket: it lists in order, and knows conditional writes."""
        return (urlsplit(self.root).hostname or "").endswith((".amazonaws.com", ".amazonaws.com.cn"))

    def client(self) -> Any:
        """Return the client of this process: a forked child must not share connections with its parent."""
        if self._pid != os.getpid():
            self._lock = threading.Lock()
            self._client = self._ours(self._made())
            self._pid = os.getpid()  # last: until then each thread makes a client of its own
        return self._client

    def keys(self) -> Any:
        """Return the credentials of this moment, renewed if they were about to expire; None for an anonymous client."""
        return None if self._options.get("anon") else _credentials(self._client).get_frozen_credentials()

    def renew(self, refused: Any) -> bool:
        """Look for credentials anew, since the server refused these; return whether there are others now.

        At most every few seconds: some servers answer 403 for a missing file, and each look reads files or asks another server.
        """
        if self._options.get("anon"):
            return False
        with self._lock, self.configuring():
            if self.keys() == refused and time.monotonic() >= self._look_at:
                self._look_at = time.monotonic() + LOOK_EVERY
                found = self._ours(self._made())
                if _credentials(found).get_frozen_credentials() != refused:
                    self._client = found
            return bool(self.keys() != refused)

    def correct_clock(self, skew: float, least: float) -> bool:
        """Sign with a clock that is ``skew`` seconds ahead of ours; return whether that differs by ``least`` from before."""
        with self._lock:
            if abs(skew - self._skew) < least:
                return False
            self._skew = skew
        return True

    def additional(self, method: str) -> dict[str, Any]:
        """Return what `s3_additional_kwargs` and `requester_pays` add to a request; as in s3fs, only what its operation knows."""
        if method not in self._additional:
            meta = self._client.meta
            shape = meta.service_model.operation_model(meta.method_to_api_mapping[method]).input_shape
            found = {name: value for name, value in self._given().items() if name in shape.members}
            fillers = {name: 1 if name == "PartNumber" else "x" for name in shape.required_members}
            with self.configuring():
                botocore.validate.validate_parameters({**fillers, **found}, shape)
            self._additional[method] = found
        return self._additional[method]

    def _given(self) -> dict[str, Any]:
        given = dict(self._options.get("s3_additional_kwargs") or {})
        if key := given.get("SSECustomerKey"):
            key = key.encode("latin-1") if isinstance(key, str) else key
            digest = hashlib.md5(key, usedforsecurity=False).digest()
            given |= {"SSECustomerKey": b64encode(key).decode(), "SSECustomerKeyMD5": b64encode(digest).decode()}
        given |= {"RequestPayer": "requester"} if self._options.get("requester_pays") else {}
        return {name: value for name, value in given.items() if name not in _NOT_ADDITIONAL and not name.startswith("Checksum")}

    @contextlib.contextmanager
    def configuring(self) -> Iterator[None]:
        """Raise ConfigError for botocore's errors, which name variables and profiles, and never what is in them."""
        try:
            yield
        except botocore.exceptions.NoCredentialsError as e:
            hint = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, an instance's role, or storage_options: key and secret, or anon: true"
            raise ConfigError(f"{self.url}: no credentials for S3 were found", hint=hint) from e
        except (botocore.exceptions.BotoCoreError, ValueError, TypeError, KeyError) as e:
            text = str(e).strip().replace("\n", " ")
            text = re.sub(r"//[^/@\s]*@", "//", unquote(text))[:300] or type(e).__name__
            raise ConfigError(f"{self.url}: {text}", hint="see storage_options, AWS_PROFILE and ~/.aws/config") from e

    def _made(self) -> Any:
        """Return a client as s3fs would make it (`S3FileSystem.set_session`), which tries once, and is paced and watched."""
        options = self._options
        given = {"key": options.get("username"), "secret": options.get("password"), **options}
        arguments = {"use_ssl": options.get("use_ssl", True), **(options.get("client_kwargs") or {})}
        config = _config(options, arguments.pop("config", None), self._limits.stall)
        if not options.get("anon"):
            arguments |= {KEYS[k]: str(given[k]) for k in KEYS if given.get(k) is not None}
        arguments |= {"endpoint_url": options["endpoint_url"]} if options.get("endpoint_url") else {}
        session = botocore.session.Session(profile=options.get("profile"))
        session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
        # times stay text: to parse those of a listing would take most of its time
        session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=lambda text: text)
        client = session.create_client("s3", config=config, **arguments)
        if not options.get("anon") and _credentials(client) is None:
            raise botocore.exceptions.NoCredentialsError
        return client

    def _ours(self, client: Any) -> Any:
        """Send the client's requests by `Transport`, and leave checksums to us.

        With TLS and a checksum a body need not be signed; botocore leaves that out only where it made the checksum.
        """
        Transport(self._limits, client._endpoint.http_session).attach(client.meta.events)  # noqa: SLF001
        client.meta.events.register("choose-signer.s3", self._signer)
        config = client.meta.config
        config.request_checksum_calculation = config.response_checksum_validation = "when_required"
        config.s3 = {**(config.s3 or {}), "payload_signing_enabled": self.signs_payload}
        return client

    def _signer(self, signature_version: Any, context: dict[str, Any], **_: Any) -> str | None:
        if not self._skew or signature_version not in ("v4", "s3v4"):
            return None
        context["skew"] = self._skew
        return _SKEWED


class _SkewedSigner(botocore.auth.S3SigV4Auth):  # type: ignore[misc]
    """Signs with the server's clock: botocore has no setting for that."""

    def _modify_request_before_signing(self, request: Any) -> None:
        now = botocore.auth.get_current_datetime() + timedelta(seconds=request.context["skew"])
        request.context["timestamp"] = now.strftime(botocore.auth.SIGV4_TIMESTAMP)
        super()._modify_request_before_signing(request)


botocore.auth.AUTH_TYPE_MAPS[_SKEWED] = _SkewedSigner


def configured(protocol: str) -> dict[str, Any]:
    """Return what variables, files or the program tell fsspec of a protocol; importing fsspec takes as long as ten small files.

    Source: filesystem-spec.readthedocs.io, "Configuration".
    """
    folder = os.environ.get("FSSPEC_CONFIG_DIR") or Path.home() / ".config" / "fsspec"
    if "fsspec" not in sys.modules and not any(name.startswith("FSSPEC_") for name in os.environ) and not Path(folder).is_dir():
        return {}
    from fsspec.config import conf  # noqa: PLC0415

    return dict(conf.get(protocol, {}))


def check_options(url: str, options: Mapping[str, Any]) -> None:
    """Raise ConfigError for options that s3fs does not know."""
    if unknown := sorted(set(options) - _OURS - _S3FS_ONLY):
        raise ConfigError(
            f"{url}: storage_options has {', '.join(unknown)}, which s3fs has not", hint=f"known are {', '.join(sorted(_OURS))}"
        )
    for name in ("client_kwargs", "config_kwargs", "s3_additional_kwargs"):
        if not isinstance(options.get(name) or {}, Mapping):
            raise ConfigError(f"{url}: storage_options: {name} is {type(options[name]).__name__}, a mapping wanted")


def _split(remote: Remote) -> tuple[str, str]:
    found = _ARN.fullmatch(remote.rest)
    bucket, _, path = (found[1], "", found[2] or "") if found else remote.rest.partition("/")
    if bucket.endswith("--x-s3"):
        raise Unsupported(f"{remote.url}: directory buckets do not list in order, and are not supported")
    try:
        return bucket, f"{checked_path(path)}/" if path else ""
    except Corrupt as e:
        raise ConfigError(f"{remote.url}: a bucket and a plain path in it wanted", hint="such as s3://bucket/checkpoints") from e


def _config(options: Mapping[str, Any], given: Any, stall: float) -> Any:
    plain = {k: dict(v) if isinstance(v, Mapping) else v for k, v in (options.get("config_kwargs") or {}).items()}
    config = botocore.config.Config(max_pool_connections=CONNECTIONS).merge(botocore.config.Config(**plain))
    config = given.merge(config) if given is not None else config
    if config.signature_version in ("s3", "s3-query"):
        raise ConfigError("signature_version s3 is no longer supported", hint="remove it: version 4 is used")
    ours = botocore.config.Config(
        signature_version=UNSIGNED if options.get("anon") else "s3v4",  # else some regions would be given URLs of version 2
        retries={"total_max_attempts": 1, "mode": "standard"},  # our own retries know how often a request may have been done
        connect_timeout=min(config.connect_timeout or stall, stall),  # urllib3's for sending, too
        read_timeout=stall,
        parameter_validation=False,  # it takes no memoryview; bytes would wait for "100 Continue"
        user_agent_extra=f"ckptsync/{__version__}",
    )
    return config.merge(ours)


@functools.cache
def _loader(data_path: str | None) -> Any:
    """Return botocore's loader of API descriptions. All clients of a process share it: reading them is most of the work of making one."""
    return botocore.loaders.create_loader(data_path)


def _prepared(client: Any, bucket: str) -> Any:
    """Return a request as botocore would send it; it is not sent."""
    seen: list[Any] = []

    def keep(request: Any, **_: Any) -> AWSResponse:
        seen.append(request)
        return AWSResponse(request.url, 200, {}, SimpleNamespace(stream=lambda **_: iter(())))

    client.meta.events.register("before-send.s3.HeadObject", keep)
    client.head_object(Bucket=bucket, Key="K")
    client.meta.events.unregister("before-send.s3.HeadObject", keep)
    return seen[0]


def _credentials(client: Any) -> Any:
    return client._request_signer._credentials  # noqa: SLF001  what the client signs with, however it was told
