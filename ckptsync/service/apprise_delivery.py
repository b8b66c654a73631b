"""A child process that delivers one message by Apprise, started by `service.alert_channels`.

The head never imports Apprise and its plug-ins, so their memory, their hangs and their log lines
end with this process.  Standard input is JSON, ``{"urls": […], "message": {"title", "body",
"type"}}``, with ``"message": null`` to check the URLs only.  Standard output is a JSON list: for
each URL what failed, or "".  Apprise's URLs and log lines hold tokens, so none of their text is
repeated, except for an HTTP status.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence

import apprise

from ckptsync.child import die_with_parent

UNKNOWN = "not an Apprise URL of a service that this version of Apprise knows"
_STATUS = re.compile(r"\berror=(\d{3})\b")


class _Records(logging.Handler):
    """Collects the lines that Apprise logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Add a line."""
        self.lines.append(record.getMessage())


def deliver(url: str, message: Mapping[str, str] | None) -> str:
    """Send a message to a URL; return what failed, or "".  None only checks the URL.  Never raises.

    A redirection is a failure, since a token would go along; long texts are sent in several
    messages.  The URL may say otherwise (``redirect=``, ``overflow=``).
    """
    asset = apprise.AppriseAsset(app_id="ckptsync", app_desc="ckptsync")
    logger = logging.getLogger("apprise")
    records = _Records()
    logger.handlers, logger.propagate = [records], False
    try:
        service = apprise.Apprise.instantiate(url, asset=asset)
        if service is None:
            return UNKNOWN
        if message is None:
            return ""
        if "redirect=" not in url:
            service.redirects = False
        if "overflow=" not in url:
            service.overflow_mode = apprise.OverflowMode.SPLIT
        sender = apprise.Apprise(asset=asset)
        sender.add(service)
        is_delivered = sender.notify(
            message["body"],
            title=message["title"],
            notify_type=apprise.NotifyType(message["type"]),
            body_format=apprise.NotifyFormat.TEXT,
        )
    except Exception as e:  # noqa: BLE001 - a plug-in's bug; its text may hold a token
        return f"Apprise failed ({type(e).__name__})"
    return "" if is_delivered else _reason(records.lines)


def _reason(lines: Sequence[str]) -> str:
    """Return why a delivery failed, from Apprise's log lines, without their text."""
    for line in lines:
        if status := _STATUS.search(line):
            return f"HTTP status {status[1]}"
    if any("onnection error" in line for line in lines):
        return "no connection, or no answer in time"
    return "not accepted"


def main() -> None:
    """Read a request from standard input, answer on standard output; die with the parent."""
    die_with_parent()
    if bundle := os.environ.get("SSL_CERT_FILE"):  # requests has another name for it
        os.environ.setdefault("REQUESTS_CA_BUNDLE", bundle)
    request = json.load(sys.stdin)
    json.dump([deliver(url, request["message"]) for url in request["urls"]], sys.stdout)


if __name__ == "__main__":
    main()
