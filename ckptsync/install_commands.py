"""The commands, for hints, that install a missing package.

They fit the Python that runs ckptsync, and the way in which ckptsync itself was installed.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from urllib.parse import unquote

_OF_EXTRA = re.compile(r"extra\s*==\s*['\"]([\w-]+)['\"]")


def install(*packages: str) -> str:
    """Return the command that installs packages into the Python that runs this.

    It uses pip if the environment has it, else uv, which makes environments without pip.
    """
    from importlib.metadata import distributions  # noqa: PLC0415 - 20 ms

    python = sys.executable
    with_pip, with_uv = [python, "-m", "pip", "install"], ["uv", "pip", "install", "-p", python]
    # not find_spec: asked for pip, setuptools replaces distutils
    has_pip = any(distributions(name="pip"))
    return shlex.join([*(with_pip if has_pip else with_uv), *packages])


def install_extra(extra: str) -> str:
    """Return the command that installs the packages of an extra; of "", those of ckptsync itself.

    Return a sentence instead if ckptsync runs from its source, uninstalled, or has no such extra.
    """
    from importlib.metadata import PackageNotFoundError, requires  # noqa: PLC0415 - 20 ms

    try:
        listed = requires("ckptsync") or []
    except PackageNotFoundError:  # it runs from its source
        listed = []
    packages = []
    for requirement in listed:
        package, _, marker = requirement.partition(";")
        of_extra = _OF_EXTRA.search(marker)
        if (of_extra[1] if of_extra else "") == extra:
            packages.append(package.strip())
    return install(*packages) if packages else f"install the extra ckptsync[{extra}]"


def install_self(python: str) -> str:
    """Return the command that installs this ckptsync into another Python.

    ``python``: its interpreter. PEP 610's ``direct_url.json`` names the directory, archive or
    repository that ckptsync was installed from; without that file the command uses the package
    index.
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
