"""The command that installs what is missing here, however ckptsync itself was installed."""

from __future__ import annotations

import json
import re
import shlex
import sys
from importlib.util import find_spec
from urllib.parse import unquote

_OF_EXTRA = re.compile(r"extra\s*==\s*['\"]([\w-]+)['\"]")


def install(*packages: str) -> str:
    """Return the command that installs packages into the Python that runs this.

    An environment without pip is uv's.
    """
    python = shlex.quote(sys.executable)
    program = f"{python} -m pip install" if find_spec("pip") else f"uv pip install -p {python}"
    return shlex.join([*shlex.split(program), *packages])


def install_extra(extra: str) -> str:
    """Return the command that installs the packages of an extra, or without one our own needs."""
    from importlib.metadata import PackageNotFoundError, requires  # noqa: PLC0415 - 20 ms

    try:
        listed = requires("ckptsync") or []
    except PackageNotFoundError:  # it runs from its source
        listed = []
    wanted = []
    for requirement in listed:
        package, _, marker = requirement.partition(";")
        of_extra = _OF_EXTRA.search(marker)
        if (of_extra[1] if of_extra else "") == extra:
            wanted.append(package.strip())
    return install(*wanted) if wanted else f"install the extra ckptsync[{extra}]"


def install_self(python: str) -> str:
    """Return the command that installs this ckptsync into another Python.

    From the directory or archive that it came from, by PEP 610's ``direct_url.json``; from the
    index that pip asks only where it came from one.
    """
    from importlib.metadata import PackageNotFoundError, distribution  # noqa: PLC0415 - 20 ms

    try:
        text = distribution("ckptsync").read_text("direct_url.json")
    except PackageNotFoundError:
        text = None
    origin = json.loads(text) if text else {}
    url = str(origin.get("url", ""))
    version_control = origin.get("vcs_info")
    if isinstance(version_control, dict):
        commit = version_control.get("commit_id", "")
        url = f"{version_control.get('vcs', 'git')}+{url}{'@' if commit else ''}{commit}"
    if url.startswith("file://"):
        url = unquote(url.removeprefix("file://"))
    return shlex.join([python, "-m", "pip", "install", url or "ckptsync"])
