"""Why a connection over SSH came to its end, or an SFTP server refused, as errors that the operator can act on."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from ckptsync.errors import ConfigError, StoreError, Transient
from ckptsync.stores.sftp.place import Place
from ckptsync.stores.sftp.wire import Code, Malformed, Refused

_LINE = 300
_CHANGED = re.compile(r"IDENTIFICATION HAS CHANGED|Offending \S+ key|REVOKED HOST KEY|HOST KEY.*REVOKED", re.IGNORECASE)
_UNKNOWN = re.compile(r"Host key verification failed|host key is known for|authenticity of host", re.IGNORECASE)
_NO_KEY = re.compile(
    r"Permission denied \(|Too many authentication failures|No supported authentication methods|Permission denied, please"
)
_OPEN_KEY = re.compile(r"""Permissions [0-9]+ for ['"](.*)['"] are too open""")
_SETTINGS = re.compile(
    r"[Bb]ad configuration option|[Bb]ad owner or permissions|terminating, [0-9]+ bad|no matching [a-z ]+ found|[Mm]issing argument"
    r"|[Cc]an't open user config file|unsupported option|no argument after keyword"
)
_NO_SUCH_HOST = re.compile(r"Name or service not known|No address associated|nodename nor servname|not known")
_NO_SFTP = re.compile(r"subsystem request failed|sftp-server.*(not found|No such file)")
_WHY = {
    Code.PERMISSION_DENIED: "permission denied",
    Code.NO_SUCH_FILE: "no such file or directory",
    Code.FAILURE: "the server failed and gives no reason",
    Code.BAD_MESSAGE: "the server does not take this request",
    Code.OP_UNSUPPORTED: "the server cannot do this",
}


def what_ssh_said(place: Place, heard: bytes, code: int | None, *, has_answered: bool) -> ConfigError | StoreError:
    """Why there is no connection: ``heard`` is ssh's standard error, ``code`` its exit code.  See ssh(1): 255 is its own failure."""
    said = _cleaned(heard)
    if has_answered:  # nothing that a server says once it serves is about keys
        return Transient(f"{place.url}: the connection is gone{_because(said)}")
    text = heard.decode("utf-8", "replace")
    if _CHANGED.search(text):
        return _changed_key(place)
    if _UNKNOWN.search(text):
        return _unknown_key(place)
    if _NO_KEY.search(text):
        if found := _OPEN_KEY.search(text):
            return ConfigError(
                f"{place.url}: ssh takes no private key that others may read: {found[1]}", hint=f"chmod 600 {found[1]}"
            )
        return ConfigError(f"{place.url}: the server does not let {_who(place)} in: {_last(said, _NO_KEY)}", hint=_keys_hint(place))
    if _SETTINGS.search(text):
        return ConfigError(f"{place.url}: {_last(said, _SETTINGS)}", hint="see ~/.ssh/config, and the server's sshd_config")
    if _NO_SFTP.search(text) or code == 127:
        hint = "its sshd_config needs: Subsystem sftp internal-sftp"
        return ConfigError(f"{place.url}: no SFTP is offered to {_who(place)}", hint=hint)
    if _NO_SUCH_HOST.search(text):
        return StoreError(
            f"{place.url}: no such host: {_last(said, _NO_SUCH_HOST)}", hint="is the name right, does its server answer?"
        )
    return Transient(f"{place.url}: no connection{_because(said)}", hint="is the machine up, does sshd listen on this port?")


def not_sftp(place: Place, e: Malformed, *, has_answered: bool) -> StoreError:
    """What comes is no SFTP."""
    hint = "" if has_answered else f"does something that {_who(place)} logs in with print text, or is there a ForceCommand?"
    return StoreError(f"{place.url}: the answer is no SFTP: {e}", hint=hint)


@contextlib.contextmanager
def told_of(place: Place, path: str) -> Iterator[None]:
    """Within it a refusal of the server's is a StoreError about ``path``."""
    try:
        yield
    except Refused as e:
        raise refused(place, path, e) from e


def refused(place: Place, path: str, e: Refused) -> StoreError:
    """What a server's refusal means for a path of it."""
    text = f"{path}: {_WHY.get(Code(e.code)) if e.code in _WHY else 'refused'}{_its_words(e)}"
    where = f"{place.host}:{text}"
    if e.code in (Code.NO_CONNECTION, Code.CONNECTION_LOST):
        return Transient(where)
    if e.code == Code.PERMISSION_DENIED:
        return StoreError(where, hint=f"{_who(place)} needs to read, write and search the store's directories on {place.host}")
    return StoreError(where, hint=f"look at {place.host}: its disk, its quota, its log" if e.code == Code.FAILURE else "")


def _its_words(e: Refused) -> str:
    words = _cleaned(e.text.encode("utf-8", "replace"))
    plain = {"failure", "permission denied", "no such file", "bad message", "operation unsupported", "failure."}
    return f" ({words})" if words and words.lower() not in plain else ""


def _changed_key(place: Place) -> ConfigError:
    return ConfigError(
        f"{place.url}: the host's key is not the one in {place.known_hosts}: another machine answers, or it was installed anew",
        hint=f"if it was: ssh-keygen -R '{_as_known(place)}' -f {place.known_hosts}, then {_keyscan(place)}",
    )


def _unknown_key(place: Place) -> ConfigError:
    return ConfigError(f"{place.url}: the host's key is not in {place.known_hosts}", hint=_keyscan(place))


def _keyscan(place: Place) -> str:
    port = f"-p {place.port} " if place.port else ""
    return (
        f"ssh-keyscan {port}{place.host} >> {place.known_hosts}, and compare the fingerprint (ssh-keygen -lf) with the one that is "
        f"told on {place.host} itself"
    )


def _as_known(place: Place) -> str:
    return f"[{place.host}]:{place.port}" if place.port and place.port != 22 else place.host


def _keys_hint(place: Place) -> str:
    return (
        f"is the public key in authorized_keys of {_who(place)} on {place.host}, is the private key's file readable by its owner alone, "
        "and without a passphrase or in an agent?  `ssh -v` tells more"
    )


def _who(place: Place) -> str:
    return place.user or "this user"


def _because(said: str) -> str:
    return f": {said}" if said else ""


def _last(said: str, wanted: re.Pattern[str]) -> str:
    return next((line for line in reversed(said.split("; ")) if wanted.search(line)), said)


def _cleaned(heard: bytes) -> str:
    """The last lines, as one, of what might be a stranger's words: nothing that a terminal obeys."""
    lines = heard.decode("utf-8", "replace").splitlines()
    plain = ["".join(c for c in line if c.isprintable()).strip() for line in lines]
    return "; ".join(line for line in plain if line)[-_LINE:]
