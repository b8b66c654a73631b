"""From a URL and s3fs's options to where a bucket is, and how to come in.

botocore finds out, as it does for s3fs and boto3: endpoints (`AWS_ENDPOINT_URL_S3`, a profile's ``services``, dual stack, FIPS, path or virtual-host
style, access points), credentials (keys, profiles, roles, instances, `credential_process`), certificates and proxies.  It is asked by having it prepare
one request, which is looked at and never sent; no request of ours goes through it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
import ssl
import threading
import time
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote, urlsplit

from ckptsync.errors import ConfigError, Corrupt, Unsupported
from ckptsync.paths import checked_path
from ckptsync.stores.s3.options import KEYS, check, configured
from ckptsync.stores.s3.signing import Keys
from ckptsync.stores.urls import Remote

try:
    import botocore.awsrequest
    import botocore.config
    import botocore.exceptions
    import botocore.httpsession
    import botocore.loaders
    import botocore.session
    import botocore.utils
    from botocore import UNSIGNED
except ImportError as e:
    raise ConfigError(f"s3:// stores need a library that is not here: {e}", hint="pip install 'ckptsync[s3]'") from e

LOOK_EVERY = 5.0  # seconds
_ARN = re.compile(r"(arn:[^:/]+:s3[^:/]*:[^:/]*:[^:/]*:accesspoint[/:][^/:]+)(?:/(.*))?", re.DOTALL)
_NOT_GIVEN = frozenset(
    {"Bucket", "Key", "Body", "ContentLength", "ContentMD5", "IfMatch", "IfNoneMatch", "Range", "UploadId", "PartNumber"}
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where requests for a bucket go.  ``root``: the path before the key, ending in a slash, encoded; ``region``: what is signed."""

    is_tls: bool
    host: str
    root: str
    region: str

    @property
    def is_aws(self) -> bool:
        """Whether Amazon serves it: it lists in order, and knows conditional writes."""
        return self.host.partition(":")[0].endswith((".amazonaws.com", ".amazonaws.com.cn"))


class Access:
    """``bucket`` and ``prefix`` ("" or ending in a slash) of a URL, and all that its options say; raises ConfigError.  Threads may share it."""

    def __init__(self, remote: Remote, options: Mapping[str, Any]) -> None:
        self.url = remote.url
        self.bucket, self.prefix = _split(remote)
        self._options = {**configured("s3"), **configured("s3a"), **options}
        check(self.url, self._options)
        self._lock = threading.Lock()
        self._look_at = 0.0
        with _told(self.url):
            self._session, self._client = _client_of(self._options, "")
            self._credentials: Any = None if self._is_anonymous else self._session_credentials()
        self.place = self._placed(self._client)
        config = self._client.meta.config
        self.connect_timeout = float(config.connect_timeout)
        self.knows_checksums: bool = (
            getattr(config, "request_checksum_calculation", "") != "when_required"
        )  # botocore before 1.36 has none
        signs = (config.s3 or {}).get("payload_signing_enabled")
        self.signs_payload = (
            bool(signs) if signs is not None else not self.place.is_tls
        )  # botocore's rule, for bodies with a checksum
        self._headers: dict[str, dict[str, str]] = {}

    @property
    def _is_anonymous(self) -> bool:
        return bool(self._options.get("anon"))

    def keys(self) -> Keys | None:
        """The credentials of this moment: those that end are renewed; ``None`` if nobody needs to be known."""
        if self._is_anonymous:
            return None
        with _told(self.url):
            found = self._credentials.get_frozen_credentials()
        return Keys(found.access_key, found.secret_key, found.token or "")

    def renew(self, refused: Keys | None) -> bool:
        """Look for credentials anew, since the server has refused these; whether there are others now.

        Not more often than every few seconds: some servers refuse what is not there, and each look reads files, or asks another server.
        """
        if self._is_anonymous:
            return False
        with self._lock, _told(self.url):
            if self.keys() == refused and time.monotonic() >= self._look_at:
                self._look_at = time.monotonic() + LOOK_EVERY
                self._session, self._client = _client_of(self._options, self.place.region)
                self._credentials = self._session_credentials()
            return self.keys() != refused

    def move(self, region: str) -> bool:
        """The server says that the bucket is in this region; whether that is news."""
        with self._lock:
            if not re.fullmatch(r"[a-z0-9-]{2,40}", region) or region == self.place.region:
                return False
            with _told(self.url):
                self._session, self._client = _client_of(self._options, region)
            before, self.place = self.place, self._placed(self._client, region)
            return before != self.place

    def headers(self, operation: str) -> dict[str, str]:
        """What `s3_additional_kwargs` and `requester_pays` add to a request of an operation; those it does not know are left out, as s3fs does."""
        if operation not in self._headers:
            self._headers[operation] = self._additional(operation)
        return dict(self._headers[operation])

    def context(self) -> ssl.SSLContext | None:
        """For TLS: `AWS_CA_BUNDLE`, ``verify`` and ``client_cert`` as boto3 has them."""
        if not self.place.is_tls:
            return None
        verify = dict(self._options.get("client_kwargs") or {}).get("verify")
        verify = self._session.get_config_variable("ca_bundle") or True if verify is None else verify
        try:
            context = ssl.create_default_context(cafile=botocore.httpsession.get_cert_path(verify) if verify else None)
            if not verify:
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            if cert := self._client.meta.config.client_cert:
                context.load_cert_chain(*([cert] if isinstance(cert, str) else cert))
        except (OSError, ssl.SSLError) as e:
            raise ConfigError(
                f"{self.url}: certificates cannot be read: {e}", hint="see AWS_CA_BUNDLE and client_kwargs: verify"
            ) from e
        return context

    def proxy(self) -> str:
        """The URL of the proxy to go through, from ``config_kwargs`` or the usual environment; or nothing."""
        scheme = "https" if self.place.is_tls else "http"
        proxies = self._client.meta.config.proxies
        proxies = botocore.utils.get_environ_proxies(f"{scheme}://{self.place.host}/") if proxies is None else proxies
        return str(proxies.get(scheme, ""))

    def _session_credentials(self) -> Any:
        found = self._client._request_signer._credentials  # noqa: SLF001  what the client would sign with, however it was told
        if found is None:
            raise botocore.exceptions.NoCredentialsError
        return found

    def _placed(self, client: Any, region: str = "") -> Place:
        with _told(self.url):
            request = _prepared(client, self.bucket)
        url, authorization = urlsplit(request.url), request.headers.get("Authorization", "")
        if "@" in url.netloc:
            raise ConfigError(
                f"{self.url}: endpoint_url has a user or a password in it, which are no credentials for S3", hint="take them out"
            )
        authorization = authorization.decode() if isinstance(authorization, bytes) else authorization
        scope = re.search(r"Credential=[^,]*/([^/,]+)/[^/,]+/aws4_request", authorization)
        return Place(url.scheme == "https", url.netloc, url.path.removesuffix("K"), region or (scope[1] if scope else ""))

    def _additional(self, operation: str) -> dict[str, str]:
        members = self._client.meta.service_model.operation_model(operation).input_shape.members
        given = {**(self._options.get("s3_additional_kwargs") or {})}
        given |= {"RequestPayer": "requester"} if self._options.get("requester_pays") else {}
        headers: dict[str, str] = {}
        for name, value in given.items():
            if name in members and name not in _NOT_GIVEN and not name.startswith("Checksum"):
                headers |= _header(members[name].serialization, value)
        return headers | _customer_key(headers)


def _prepared(client: Any, bucket: str) -> Any:
    """A request as botocore would send it (event "before-send"); it is not sent."""
    seen: list[Any] = []

    def keep(request: Any, **_: Any) -> botocore.awsrequest.AWSResponse:
        seen.append(request)
        return botocore.awsrequest.AWSResponse(request.url, 200, {}, SimpleNamespace(stream=lambda **_: iter(())))

    client.meta.events.register("before-send.s3.HeadObject", keep)
    client.head_object(Bucket=bucket, Key="K")
    return seen[0]


def _split(remote: Remote) -> tuple[str, str]:
    found = _ARN.fullmatch(remote.rest)
    bucket, _, path = (found[1], "", found[2] or "") if found else remote.rest.partition("/")
    if bucket.endswith("--x-s3"):
        raise Unsupported(f"{remote.url}: directory buckets do not list in order, and are not supported")
    try:
        return bucket, f"{checked_path(path)}/" if path else ""
    except Corrupt as e:
        raise ConfigError(f"{remote.url}: a bucket and a plain path in it wanted", hint="such as s3://bucket/checkpoints") from e


def _client_of(options: Mapping[str, Any], region: str) -> tuple[Any, Any]:
    """A session and its client, as s3fs would make them (`S3FileSystem.set_session`)."""
    given = {"key": options.get("username"), "secret": options.get("password"), **options}
    client = {"use_ssl": options.get("use_ssl", True), **(options.get("client_kwargs") or {})}
    client |= {KEYS[k]: str(given[k]) for k in KEYS if given.get(k) is not None}
    client |= {"endpoint_url": options["endpoint_url"]} if options.get("endpoint_url") else {}
    client |= {"region_name": region} if region else {}
    config = botocore.config.Config(**_plain(options.get("config_kwargs") or {}))
    if config.signature_version in ("s3", "s3-query"):
        raise ConfigError("signature_version s3 is no longer supported", hint="remove it: version 4 is used")
    if options.get("anon"):
        config = config.merge(botocore.config.Config(signature_version=UNSIGNED))
        client = {k: v for k, v in client.items() if k not in KEYS.values()}
    else:
        config = config.merge(
            botocore.config.Config(signature_version="s3v4")
        )  # else some regions would be given URLs of version 2
    session = botocore.session.Session(profile=options.get("profile"))
    session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
    if (given_config := client.pop("config", None)) is not None:
        config = given_config.merge(config)
    return session, session.create_client("s3", config=config, **client)


@functools.cache
def _loader(data_path: str | None) -> Any:
    """Return botocore's loader of API descriptions. All stores of a process share it: reading them is most of the work of making a client."""
    return botocore.loaders.create_loader(data_path)


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    return {k: dict(v) if isinstance(v, Mapping) else v for k, v in config.items()}


def _header(serialization: Mapping[str, str], value: Any) -> dict[str, str]:
    """One parameter of S3's API as the header it is sent in; none if it is not sent in one."""
    place, name = serialization.get("location"), serialization.get("name", "")
    if place == "headers" and isinstance(value, Mapping):
        return {f"{name}{key}": str(each) for key, each in value.items()}
    return {name: str(value).lower() if isinstance(value, bool) else _text(value)} if place == "header" else {}


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def _customer_key(headers: Mapping[str, str]) -> dict[str, str]:
    """SSE-C: the key in base64, and its MD5."""
    name = "x-amz-server-side-encryption-customer-key"
    given = next((v for k, v in headers.items() if k.lower() == name), "").encode("latin-1")
    if not given:
        return {}
    digest = hashlib.md5(given, usedforsecurity=False).digest()
    return {name: b64encode(given).decode(), f"{name}-MD5": b64encode(digest).decode()}


@contextlib.contextmanager
def _told(url: str) -> Any:
    """botocore's errors as ours.  They name variables and profiles, and never what is in them."""
    try:
        yield
    except botocore.exceptions.NoCredentialsError as e:
        hint = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, an instance's role, or storage_options: key and secret, or anon: true"
        raise ConfigError(f"{url}: no credentials for S3 were found", hint=hint) from e
    except (botocore.exceptions.BotoCoreError, ValueError, TypeError, KeyError) as e:
        raise ConfigError(f"{url}: {_first_line(e)}", hint="see storage_options, AWS_PROFILE and ~/.aws/config") from e


def _first_line(e: BaseException) -> str:
    text = str(e).strip().partition("\n")[0]
    return re.sub(r"//[^/@\s]*@", "//", unquote(text))[:300] or type(e).__name__
