"""Make botocore's client from a URL and s3fs's options, anew when credentials change.

Users have configured S3 for other programs already, so botocore finds endpoints, profiles,
credentials, certificates and proxies, in the same places as for s3fs and boto3. What the store does
itself (retries, checksums, bandwidth) is switched off in botocore here.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import os
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec

from ckptsync import __version__
from ckptsync.errors import ConfigError, Corrupt, Unsupported
from ckptsync.install_commands import install_extra
from ckptsync.safe_names import checked_path
from ckptsync.stores.limits import Limits
from ckptsync.stores.s3 import transport
from ckptsync.stores.urls import Remote

try:
    import botocore.config
    import botocore.exceptions
    import botocore.httpsession
    import botocore.loaders
    import botocore.session
    import botocore.utils
    import botocore.validate
    from botocore import UNSIGNED
except ImportError as e:
    raise ConfigError(
        f"s3:// stores need a library that is not here: {e}", hint=install_extra("s3")
    ) from e

SEARCH_EVERY = 5.0  # seconds between two searches for credentials
CONNECTIONS = 64  # idle connections that stay open
# options and botocore's names for them; if both of a pair are set, the later one counts
_CREDENTIALS = {
    "username": "aws_access_key_id",
    "password": "aws_secret_access_key",
    "key": "aws_access_key_id",
    "secret": "aws_secret_access_key",
    "token": "aws_session_token",
}
_MAPPINGS = ("client_kwargs", "config_kwargs", "s3_additional_kwargs")
OPTIONS = frozenset(
    {*_CREDENTIALS, *_MAPPINGS, "anon", "endpoint_url", "profile", "requester_pays", "use_ssl"}
)
_ARN = re.compile(r"(arn:[^:/]+:s3[^:/]*:[^:/]*:[^:/]*:accesspoint[/:][^/:]+)(?:/(.*))?", re.DOTALL)


class BucketAccess:
    """A bucket, the prefix of a store in it, and a client to reach it; threads may share it.

    ``prefix`` is "" or ends in a slash. ``takes_crc``: the options do not switch off the newer
    checksums. ``signs_payload``: a request's SHA-256 protects its body.

    The constructor raises ConfigError if options, endpoint or credentials are wrong, Unsupported
    for a directory bucket.
    """

    def __init__(
        self, remote: Remote, options: Mapping[str, Any], limits: Limits | None = None
    ) -> None:
        """Make the client, with credentials as `_make_client`; raise ConfigError or Unsupported."""
        self.url = remote.url
        self.bucket, self.prefix = _split(remote)
        self._options = {name: value for name, value in options.items() if value is not None}
        _check_options(self.url, self._options)
        self._limits = limits or Limits()
        self._lock = threading.Lock()
        self._next_search = 0.0
        self._extra_parameters: dict[str, dict[str, Any]] = {}
        with self.configuring():
            self.client, self._credentials = self._make_client()
        config = self.client.meta.config
        self.takes_crc: bool = config.request_checksum_calculation != "when_required"
        endpoint = urlsplit(self.client.meta.endpoint_url)
        if "@" in endpoint.netloc:
            raise ConfigError(
                f"{self.url}: endpoint_url has a user or a password in it, which are no credentials"
                " for S3",
                hint="take them out",
            )
        self.is_aws = (endpoint.hostname or "").endswith((".amazonaws.com", ".amazonaws.com.cn"))
        """Whether Amazon serves the bucket: it lists in order, and knows conditional writes."""
        signs = (config.s3 or {}).get("payload_signing_enabled")
        signs = endpoint.scheme != "https" if signs is None else bool(signs)
        self.signs_payload: bool = signs and not self._options.get("anon")
        self._disable_checksums(self.client)

    def keys(self) -> Any:
        """Return the credentials of this moment, renewed (by requests) if they are about to expire.

        None for an anonymous client. Raise botocore's errors.
        """
        return None if self._options.get("anon") else self._credentials.get_frozen_credentials()

    def renew(self, refused: Any) -> bool:
        """Look for credentials anew after a refusal; return whether they differ from ``refused``.

        New ones replace the client. The search is made every `SEARCH_EVERY` seconds at most: some
        servers answer 403 for a missing file, and each search reads files or sends requests.
        """
        if self._options.get("anon"):
            return False
        with self._lock, self.configuring():
            if self.keys() == refused and time.monotonic() >= self._next_search:
                self._next_search = time.monotonic() + SEARCH_EVERY
                client, credentials = self._make_client()
                if credentials.get_frozen_credentials() != refused:
                    self._disable_checksums(client)
                    self.client, self._credentials = client, credentials
            return bool(self.keys() != refused)

    def extra_parameters(self, method: str) -> dict[str, Any]:
        """Return the parameters that `s3_additional_kwargs` and `requester_pays` add to a request.

        As in s3fs, only those that the request's operation has, and no checksums. They are
        remembered. Raise ConfigError if one is invalid.
        """
        if method not in self._extra_parameters:
            meta = self.client.meta
            operation = meta.service_model.operation_model(meta.method_to_api_mapping[method])
            shape = operation.input_shape
            options = dict(self._options.get("s3_additional_kwargs") or {})
            if self._options.get("requester_pays"):
                options["RequestPayer"] = "requester"
            extra = {
                name: value
                for name, value in options.items()
                if name in shape.members and not name.startswith("Checksum")
            }
            fillers = {name: 1 if name == "PartNumber" else "x" for name in shape.required_members}
            with self.configuring():
                botocore.validate.validate_parameters({**fillers, **extra}, shape)
            self._extra_parameters[method] = extra
        return self._extra_parameters[method]

    @contextlib.contextmanager
    def configuring(self) -> Iterator[None]:
        """Raise botocore's configuration errors in this block as ConfigError.

        Messages name variables and profiles, but not their values.
        """
        try:
            yield
        except botocore.exceptions.NoCredentialsError as e:
            hint = (
                "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, a role of the"
                " instance, or storage_options: key and secret, or anon: true"
            )
            raise ConfigError(f"{self.url}: no credentials for S3 were found", hint=hint) from e
        except (botocore.exceptions.BotoCoreError, ValueError, TypeError, KeyError) as e:
            text = str(e).strip().replace("\n", " ")
            text = re.sub(r"//[^/@\s]*@", "//", unquote(text))[:300] or type(e).__name__
            raise ConfigError(
                f"{self.url}: {text}", hint="see storage_options, AWS_PROFILE and ~/.aws/config"
            ) from e

    def _make_client(self) -> tuple[Any, Any]:
        """Return a client that tries once and sends through `transport`, and its credentials.

        It is configured as s3fs would configure it (`S3FileSystem.set_session`). The search for
        credentials may run a program, or ask a metadata service. Raise NoCredentialsError and other
        errors of botocore.
        """
        options = self._options
        is_anonymous = bool(options.get("anon"))
        arguments = dict(options.get("client_kwargs") or {})
        config = _config(options, arguments.pop("config", None), self._limits.stall)
        arguments |= {k: options[k] for k in ("endpoint_url", "use_ssl") if k in options}
        if not is_anonymous:
            arguments |= {_CREDENTIALS[k]: str(options[k]) for k in _CREDENTIALS if k in options}
        session = botocore.session.Session(profile=options.get("profile"))
        session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
        # times stay text: to parse those of a listing would take most of its time
        session.get_component("response_parser_factory").set_parser_defaults(
            timestamp_parser=lambda text: text
        )
        client = session.create_client("s3", config=config, **arguments)
        if arguments.get("aws_access_key_id") and arguments.get("aws_secret_access_key"):
            session.set_credentials(*map(arguments.get, dict.fromkeys(_CREDENTIALS.values())))
        credentials = session.get_credentials()
        if not is_anonymous and credentials is None:
            raise botocore.exceptions.NoCredentialsError
        transport.attach(client, _http_session(session, client, arguments), self._limits)
        return client, credentials

    def _disable_checksums(self, client: Any) -> None:
        """Set the client to leave checksums to this package.

        With TLS and a checksum a body need not be signed; botocore omits the signature only where
        it computed the checksum.
        """
        config = client.meta.config
        config.request_checksum_calculation = config.response_checksum_validation = "when_required"
        config.s3 = {**(config.s3 or {}), "payload_signing_enabled": self.signs_payload}


def _check_options(url: str, options: Mapping[str, Any]) -> None:
    """Raise ConfigError for unknown options, and for those of `_MAPPINGS` that are no mappings."""
    if unknown := sorted(set(options) - OPTIONS):
        hint = f"remove them; known are {', '.join(sorted(OPTIONS))}"
        raise ConfigError(f"{url}: unknown storage_options: {', '.join(unknown)}", hint=hint)
    for name in _MAPPINGS:
        if not isinstance(options.get(name) or {}, Mapping):
            kind = type(options[name]).__name__
            raise ConfigError(f"{url}: storage_options: {name} is {kind}, expected a mapping")


def _split(remote: Remote) -> tuple[str, str]:
    """Return the bucket, or the access point's ARN, and the prefix of a URL.

    Raise ConfigError if the path is not plain, Unsupported for a directory bucket.
    """
    arn = _ARN.fullmatch(remote.rest)
    bucket, _, path = (arn[1], "", arn[2] or "") if arn else remote.rest.partition("/")
    if bucket.endswith("--x-s3"):
        raise Unsupported(
            f"{remote.url}: directory buckets do not list in order, and are not supported"
        )
    try:
        return bucket, f"{checked_path(path)}/" if path else ""
    except Corrupt as e:
        raise ConfigError(
            f"{remote.url}: expected a bucket and a plain path",
            hint="write a URL such as s3://bucket/checkpoints",
        ) from e


def _config(options: Mapping[str, Any], client_config: Any, stall: float) -> Any:
    """Return botocore's configuration: the user's options, then ours, which count.

    ``options``: the storage_options, which precede ``client_config``, a botocore Config or None.
    ``stall``: seconds without a byte after which a request fails. Raise ConfigError for signature
    version 2.
    """
    kwargs = {"max_pool_connections": CONNECTIONS, **(options.get("config_kwargs") or {})}
    config = botocore.config.Config(**kwargs)
    config = client_config.merge(config) if client_config is not None else config
    if config.signature_version in ("s3", "s3-query"):
        hint = "remove it: version 4 is used"
        raise ConfigError("signature_version s3 is no longer supported", hint=hint)
    our_config = botocore.config.Config(
        # else some regions would be given URLs of version 2
        signature_version=(UNSIGNED if options.get("anon") else "s3v4"),
        # our own retries know how often a request may have been done
        retries={"total_max_attempts": 1, "mode": "standard"},
        connect_timeout=min(config.connect_timeout or stall, stall),  # urllib3's for sending, too
        read_timeout=stall,
        parameter_validation=False,  # it takes no memoryview; bytes would wait for "100 Continue"
        user_agent_extra=f"ckptsync/{__version__}",
    )
    return config.merge(our_config)


class _DescriptionReader(botocore.loaders.JSONFileLoader):  # type: ignore[misc]
    """Reads botocore's API descriptions by msgspec, in a third of the time."""

    def load_file(self, file_path: str) -> Any:
        """Return the content of ``file_path`` with .json or .json.gz added; None without a file."""
        for suffix, open_file in ((".json", open), (".json.gz", gzip.open)):
            with (
                contextlib.suppress(FileNotFoundError),
                open_file(file_path + suffix, "rb") as file,
            ):
                return msgspec.json.decode(file.read())
        return None


@functools.cache
def _loader(data_path: str | None) -> Any:
    """Return botocore's loader of the API description of S3, cached: reading takes long.

    ``data_path``: where else it looks; None for botocore's own directories.
    """
    loader = botocore.loaders.create_loader(data_path)
    loader.file_loader = _DescriptionReader()
    loader.list_available_services = lambda _: ["s3"]  # else it opens the directories of 400
    return loader


def _http_session(session: Any, client: Any, arguments: Mapping[str, Any]) -> Any:
    """Return connections with the certificates, proxies and timeouts that botocore would use."""
    config, verify = client.meta.config, arguments.get("verify")
    if verify is None:
        verify = session.get_config_variable("ca_bundle")
    if verify is None:
        verify = os.environ.get("REQUESTS_CA_BUNDLE") or True
    proxies = config.proxies
    if proxies is None:
        proxies = botocore.utils.get_environ_proxies(client.meta.endpoint_url)
    options = [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)]
    if config.tcp_keepalive or session.get_scoped_config().get("tcp_keepalive") == "true":
        options.append((socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1))
    return botocore.httpsession.URLLib3Session(
        verify=verify,
        proxies=proxies,
        timeout=(config.connect_timeout, config.read_timeout),
        max_pool_connections=config.max_pool_connections,
        socket_options=options,
        client_cert=config.client_cert,
        proxies_config=config.proxies_config,
    )
