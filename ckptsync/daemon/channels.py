"""How an alert leaves this machine: by POST, or into a command.

What a channel is given may be seen by anybody who gets alerts; where it goes may be a secret (tokens in URLs), so no error names more than a host.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any, Protocol

from ckptsync import __version__
from ckptsync.digest import digest
from ckptsync.errors import ConfigError, StoreError

PATIENCE = 15.0
"""s for a webhook's answer, and for each step on the way to it."""
RUNS = 60.0
"""s that a command may take."""
KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "USER", "LOGNAME", "TMPDIR", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy", "SSL_CERT_FILE", "SSL_CERT_DIR")  # fmt: skip
"""Variables that a command inherits: no store's keys are among them."""


class Channel(Protocol):
    """``name``: as status and metrics call it; no secret.  ``target``: a digest of where it goes."""

    name: str
    target: str

    def deliver(self, document: Mapping[str, Any]) -> None:
        """Until somebody has taken it; raises StoreError.  Never longer than about a minute."""
        ...


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A POST that is sent elsewhere would become a GET, and the token would go along."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


class Webhook:
    """POSTs JSON; raises ConfigError for what is no URL.  Anything but a 2xx is a failure, redirections too."""

    name = "webhook"

    def __init__(self, url: str) -> None:
        self._url, self.target = url, digest(url.encode())
        try:
            parts = urllib.parse.urlsplit(url)
        except ValueError:
            raise ConfigError("alerts.webhook: not a URL") from None
        self._where = f"webhook {parts.scheme}://{parts.hostname or ''}"
        self._opener = urllib.request.OpenerDirector()  # no file:, no ftp:
        for handler in (
            urllib.request.ProxyHandler(),
            urllib.request.HTTPHandler(),
            urllib.request.HTTPSHandler(),
            urllib.request.HTTPDefaultErrorHandler(),
            urllib.request.HTTPErrorProcessor(),
            _NoRedirect(),
            urllib.request.UnknownHandler(),
        ):
            self._opener.add_handler(handler)

    def deliver(self, document: Mapping[str, Any]) -> None:
        """As `Channel` says."""
        headers = {"Content-Type": "application/json", "User-Agent": f"ckptsync/{__version__}"}
        try:
            request = urllib.request.Request(self._url, json.dumps(document).encode(), headers, method="POST")  # noqa: S310 - the opener knows no other schemes
            self._opener.open(request, timeout=PATIENCE).close()
        except urllib.error.HTTPError as e:
            with e:
                raise StoreError(
                    f"{self._where}: answered {e.code}", hint="see alerts.webhook, and what that service logs"
                ) from None
        except (OSError, http.client.HTTPException, ValueError) as e:
            reason = getattr(e, "reason", e)
            raise StoreError(f"{self._where}: {_plain(reason)}", hint="see alerts.webhook, DNS, proxy and firewall") from None


def _plain(reason: object) -> str:
    """What an error says without what it may repeat of the URL."""
    if isinstance(reason, TimeoutError):
        return f"no answer within {PATIENCE:g} s"
    return (reason.strerror if isinstance(reason, OSError) else None) or "cannot be asked"


class Command:
    """Runs an argument list, with the alert as JSON on its standard input, no shell, and few variables; what it prints is not kept."""

    name = "command"

    def __init__(self, words: tuple[str, ...]) -> None:
        self._words, self.target = words, digest(json.dumps(words).encode())
        self._where = f"alert command {words[0]}"

    def deliver(self, document: Mapping[str, Any]) -> None:
        """As `Channel` says.  All that it started is killed with it when it takes too long."""
        environment = {name: os.environ[name] for name in KEPT if name in os.environ}
        try:
            child = subprocess.Popen(  # noqa: S603 - the operator's own, from the configuration
                self._words,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                cwd="/",
                start_new_session=True,
            )
        except OSError as e:
            raise StoreError(f"{self._where}: {e.strerror}", hint="see alerts.command, and what the service may run") from None
        with child:
            self._wait(child, json.dumps(document).encode() + b"\n")

    def _wait(self, child: subprocess.Popen[bytes], data: bytes) -> None:
        try:
            child.communicate(data, RUNS)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            raise StoreError(f"{self._where}: took longer than {RUNS:g} s and was killed") from None
        if child.returncode:
            raise StoreError(
                f"{self._where}: exit status {child.returncode}",
                hint="run it by hand with a document as `ckptsync help monitoring` shows it",
            )
