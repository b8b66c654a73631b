"""docs/doctor.md names every kind of finding there is, and no other."""

import ast
import re
from pathlib import Path

from ckptsync.doctor import probe
from ckptsync.doctor.permissions import WHY

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs/doctor.md").read_text()
_AT = {"Finding": 1, "refusal": 1, "fail": 0, "warn": 0, "say": 0, "_warn": 0, "_finding": 0}  # which argument is the kind


def kinds_of_the_code() -> set[str]:
    sources = [*(ROOT / "ckptsync/doctor").glob("*.py"), ROOT / "ckptsync/cli/doctor.py"]
    calls = [node for path in sources for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    given = [
        call.args[_AT[call.func.id]] for call in calls if isinstance(call.func, ast.Name) and call.func.id in _AT and call.args
    ]
    return {str(arg.value) for arg in given if isinstance(arg, ast.Constant)} | {f"store-{right}" for right in WHY}


def kinds_of_the_document() -> set[str]:
    rows = [line.split("|")[1] for line in TEXT.splitlines() if re.search(r"\| (fail|warn)", line)]
    return {kind for row in rows for kind in re.findall(r"`([^`]+)`", row)}


def test_every_kind_is_described() -> None:
    assert kinds_of_the_code() == kinds_of_the_document()


def test_every_variable_that_is_told_is_named() -> None:
    told = TEXT.partition("## What is told")[2]
    names = set(re.findall(r"`([A-Z0-9_]+)`", told))
    wanted = {*probe.LAUNCH, *probe.MASTER, "CUDA_VISIBLE_DEVICES", *probe.OTHERS, *probe.PREFIXES}
    assert wanted <= names


def test_every_kind_is_planted_by_some_test() -> None:
    files = [path for path in (ROOT / "tests").glob("test_*doctor*.py") if path != Path(__file__)]
    said = {word for path in files for word in re.findall(r'"([a-z0-9-]+)"', path.read_text())}
    planted = kinds_of_the_code() & (said | {f"store-{right}" for right in WHY if right in said})
    assert kinds_of_the_code() - planted == set()
    assert len(planted) >= 60
