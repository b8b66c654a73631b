"""docs/doctor.md names every kind of finding there is, and no other."""

import ast
import re
from pathlib import Path

from ckptsync.doctor import probe
from ckptsync.doctor.store_checks import OPERATIONS

ROOT = Path(__file__).parents[2]
LEVELS = {"fail", "warn", "level"}
TEXT = (ROOT / "docs/doctor.md").read_text()


def kinds_of_the_code() -> set[str]:
    """The kinds that calls of `fail`, `warn` and `refusal` name."""
    found = {f"store-{operation}" for operation in OPERATIONS} | {"configuration", "no-answer"}
    for path in (ROOT / "ckptsync/doctor").glob("*.py"):
        for call in [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
        ]:
            names = {node.id for node in ast.walk(call.func) if isinstance(node, ast.Name)}
            at = 1 if names & {"refusal", "find_difference"} else 0 if names & LEVELS else None
            if at is not None and len(call.args) > at and isinstance(call.args[at], ast.Constant):
                found.add(str(call.args[at].value))  # type: ignore[attr-defined]
    return found


def kinds_of_the_document() -> set[str]:
    rows = [line.split("|")[1] for line in TEXT.splitlines() if re.search(r"\| (fail|warn)", line)]
    return {kind for row in rows for kind in re.findall(r"`([^`]+)`", row)}


def test_every_kind_is_described() -> None:
    assert kinds_of_the_code() == kinds_of_the_document()


def test_every_variable_that_is_told_is_named() -> None:
    told = TEXT.partition("## What doctor publishes")[2]
    names = set(re.findall(r"`([A-Z0-9_]+)`", told))
    wanted = {*probe.LAUNCH, *probe.MASTER, "CUDA_VISIBLE_DEVICES", *probe.OTHERS, *probe.PREFIXES}
    assert wanted <= names
