"""Asking a bucket: sign, send, receive, and learn from a refusal.  Nothing is tried again here: what may help is raised as Transient."""

from __future__ import annotations

import hashlib
import http.client
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptsync import __version__
from ckptsync.errors import CkptsyncError, Transient
from ckptsync.stores.limits import Limits
from ckptsync.stores.s3.access import Access, Place
from ckptsync.stores.s3.errors import http_date, lost, sorted_error
from ckptsync.stores.s3.signing import UNSIGNED, Keys, Signable, encoded, query_string, signed
from ckptsync.stores.s3.wire import Answer, Begin, Sending, Wire
from ckptsync.stores.s3.xml import Fault, fault

Query = Sequence[tuple[str, str]]
_EMPTY = hashlib.sha256(b"").hexdigest()
_SKEW = 30.0  # seconds by which a corrected clock has to differ, for the correction to be news
_METHODS = {
    "Put": "PUT",
    "Upload": "PUT",
    "Create": "POST",
    "Complete": "POST",
    "Abort": "DELETE",
    "Delete": "DELETE",
    "Head": "HEAD",
}
_OLD_KEYS = frozenset({"ExpiredToken", "TokenRefreshRequired", "InvalidToken", "RequestExpired"})  # with any status

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.  ``operation``: S3's name of it; ``key``: whole, or "" for the bucket itself; ``patience`` as in `s3.wire.Sending`."""

    operation: str
    key: str = ""
    query: Query = ()
    headers: Mapping[str, str] | None = None
    body: bytes | memoryview = b""
    patience: float = 1.0


class Bucket:
    """A bucket, as one store asks it.  Threads may share it."""

    def __init__(self, access: Access, limits: Limits) -> None:
        self.access, self._place = access, access.place
        self._wire = Wire(limits, access.context(), access.proxy(), access.connect_timeout)
        self._lock = threading.Lock()
        self._skew = 0.0  # seconds that the server's clock is ahead of ours
        self._has_answered = False

    @property
    def is_aws(self) -> bool:
        """Whether Amazon serves it."""
        return self._place.is_aws

    def url(self, key: str) -> str:
        """How a key is called in messages."""
        return f"s3://{self.access.bucket}/{key}" if key else f"s3://{self.access.bucket}"

    def ask(self, ask: Ask, begin: Begin | None = None) -> Answer:
        """What the server says, if it is no error; the body of a ranged read goes where ``begin`` says.  Raises as `s3.errors` says."""
        place, keys, what = self._place, self.access.keys(), self.url(ask.key or dict(ask.query).get("prefix", "").rstrip("/"))
        try:
            answer = self._wire.exchange(place, self._sending(ask, place, keys), begin)
        except (OSError, http.client.HTTPException) as e:
            raise lost(what, place.host, e, has_answered=self._has_answered) from e
        self._has_answered = True
        # a 200 may be an error, too: of CompleteMultipartUpload by S3's own rules, of others by a proxy's
        found = fault(answer.body) if answer.status >= 300 or b"<Error" in answer.body else Fault()
        if answer.status < 300 and not found.code:
            return answer
        error = sorted_error(what, ask.operation, answer.status if answer.status >= 300 else 500, found, answer.headers)
        raise self._learned(answer, found, place, keys, error)

    def server_time(self, answer: Answer) -> float:
        """The server's clock when it answered; ours if it does not say."""
        return _date(answer) or time.time()

    def _sending(self, ask: Ask, place: Place, keys: Keys | None) -> Sending:
        headers = {
            "User-Agent": f"ckptsync/{__version__}",
            "Accept-Encoding": "identity",
            **self.access.headers(ask.operation),
            **(ask.headers or {}),
        }
        method = next((m for start, m in _METHODS.items() if ask.operation.startswith(start)), "GET")
        if ask.body or method in ("PUT", "POST"):
            headers["Content-Length"] = str(len(ask.body))
        path = f"{place.root}{encoded(ask.key)}" if ask.key else place.root if place.root == "/" else place.root.removesuffix("/")
        signable = Signable(method, place.host, path, ask.query, headers, self._payload(ask.body))
        headers = signed(signable, keys, place.region, time.time() + self._skew)
        query = query_string(ask.query)
        return Sending(method, f"{path}?{query}" if query else path, headers, ask.body, ask.patience)

    def _payload(self, body: bytes | memoryview) -> str:
        if not body:
            return _EMPTY
        is_small = len(body) < 1 << 16  # what has no checksum of its own: lists of parts
        return hashlib.sha256(body).hexdigest() if self.access.signs_payload or is_small else UNSIGNED

    def _learned(self, answer: Answer, found: Fault, place: Place, keys: Keys | None, error: CkptsyncError) -> CkptsyncError:
        """The error, or a Transient one where the refusal itself says how to do better."""
        is_refused = answer.status in (401, 403) or found.code in _OLD_KEYS
        if is_refused and found.code != "RequestTimeTooSkewed" and self.access.renew(keys):
            return Transient(f"{error}; credentials were renewed")
        if found.code == "RequestTimeTooSkewed" and self._set_clock(answer):
            return Transient(f"{error}; signing with the server's clock from now on")
        if answer.status in (301, 307, 400) and self._moved(answer, found, place):
            return Transient(f"{self.url('')} is at {self._place.host}, region {self._place.region or 'unknown'}")
        return error

    def _set_clock(self, answer: Answer) -> bool:
        date = _date(answer)
        with self._lock:
            if date is None or abs(date - time.time() - self._skew) < _SKEW:
                return False
            self._skew = date - time.time()
        log.warning(
            "this machine's clock is %.0f s behind that of %s, which refuses to be asked so: set it", self._skew, self._place.host
        )
        return True

    def _moved(self, answer: Answer, found: Fault, place: Place) -> bool:
        """Whether the answer says in which region the bucket is, and that was not known.

        botocore's endpoint of that region is asked from then on; never what ``Location`` names: credentials are for the configured host.
        """
        region = answer.headers.get("x-amz-bucket-region") or found.region
        with self._lock:
            if place != self._place:
                return True  # another thread has been told
            if region and self.access.move(region):
                self._place = self.access.place
                return True
        return False


def _date(answer: Answer) -> float | None:
    return http_date(answer.headers.get("Date", ""))
