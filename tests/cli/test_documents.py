"""The documents and examples that a hint names are there wherever the program is installed."""

import ast
import json
import re
import shlex
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptsync.cli.commands import COMMANDS
from ckptsync.cli.main import main, parser
from ckptsync.errors import ConfigError
from tests.support.stand_in_programs import ROOT, ran

BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
CONFIGS = sorted(path for path in (ROOT / "configs").rglob("*") if path.is_file())
EXAMPLES = sorted(
    path.relative_to(ROOT / "configs").as_posix().removesuffix(".yaml") for path in CONFIGS
)
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")])
TOPICS = sorted([*(path.stem for path in (ROOT / "docs").rglob("*.md")), "json-schema"])
HINTED = re.compile(r"`ckptsync (help|config example) ([a-z0-9.-]+)`")
QUOTED = re.compile(r"`(?:sudo -u \S+ )?ckptsync ([a-z]+)([^`]*)`")
LINE = re.compile(r"^(?:    |\$ )?(?:[A-Z_]+=\S+ )*ckptsync ([a-z]+)([^#\n]*)", re.MULTILINE)
STORES = re.compile(r"://|^/mnt|^/data/store|STORE|^\[?URL")
OF_A_STORE = ("ls", "status", "verify", "repair", "gc", "keep", "rm", "push", "doctor")


def texts() -> Iterator[tuple[str, str]]:
    """Where, and what: every text of the program that a user may see, and what is installed beside
    it.
    """
    for path in sorted((ROOT / "ckptsync").rglob("*.py")):
        tree = ast.parse(path.read_text())
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and id(node) not in docs
            ):
                yield f"{path}:{node.lineno}", node.value
    for path in [*CONFIGS, *(ROOT / "systemd").rglob("*.*")]:
        yield str(path), path.read_text()


def test_every_command_that_a_text_names_works(capsys: pytest.CaptureFixture[str]) -> None:
    hinted = set()
    for where, text in texts():
        hinted |= set(HINTED.findall(text))
        assert all(word in COMMANDS for word, _ in QUOTED.findall(text)), (where, text)
        for command, rest in QUOTED.findall(text):
            parse(command, rest, where)
        assert not re.search(r"\b(docs|configs)/[a-z]", text), (where, text)
    assert {"service", "configuration", "trainers", "hook", "monitoring", "sftp"} <= {
        name for command, name in hinted if command == "help"
    }
    assert ("config example", "both") in hinted
    for command, name in sorted(hinted):
        assert main([*command.split(), name]) == 0, (command, name)
        assert len(capsys.readouterr().out) > 300


def parse(command: str, rest: str, where: str) -> None:
    """Parse a command line of a text; its placeholders are words as any others."""
    rest = rest.partition(" && ")[0].partition(" | ")[0].partition(" > ")[0].partition("; [")[0]
    rest = re.sub(r"\{[^{}]*\}|<[^<>]*>", "X", rest).replace("…", "X")
    words = shlex.split(rest)
    if not words or words in (["install", ","], ["COMMAND"]):
        return
    try:
        args = parser(command).parse_args(words)
    except ConfigError as e:
        # an action or an argument that a sentence leaves out
        assert re.search("required|expected one argument", str(e)), (where, command, rest, str(e))  # noqa: PT017
        return
    if command in OF_A_STORE:
        acted_on = [*getattr(args, "targets", ()), *getattr(args, "directories", ())]
        stores = [word for word in acted_on if STORES.search(word)]
        assert not stores, (where, command, rest)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_command_line_of_a_document_is_in_todays_grammar(path: Path) -> None:
    text = path.read_text()
    lines = [*LINE.findall(text), *QUOTED.findall(text)]
    for command, rest in lines:
        if command in COMMANDS and not rest.startswith(("[", " what", " is", " runs")):
            parse(command, rest, path.name)


def test_a_name_is_looked_up_and_a_wrong_one_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "--json"]) == 0
    assert sorted(json.loads(capsys.readouterr().out)["topics"]) == TOPICS
    assert main(["config", "example", "--json"]) == 0
    assert sorted(json.loads(capsys.readouterr().out)["examples"]) == EXAMPLES
    assert main(["help", "monitorng"]) == 2
    assert "did you mean monitoring?" in capsys.readouterr().err
    assert main(["config", "example", "head", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == (ROOT / "configs/head.yaml").read_text()


def test_a_wheel_has_all_documents_and_no_line_that_every_python_would_read(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", "69")
    project = tmp_path / "project"
    shutil.copytree(
        ROOT / "ckptsync",
        project / "ckptsync",
        ignore=shutil.ignore_patterns("__pycache__", "demo_data"),
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, project)
    done = ran("-c", BUILD, str(tmp_path), path=(), cwd=project)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(tmp_path / done.stdout.split()[-1]) as wheel:
        names = set(wheel.namelist())
    files = [path for path in (ROOT / "docs").rglob("*.*") if path.stem in TOPICS]
    assert {f"ckptsync/{path.relative_to(ROOT)}" for path in [*files, *CONFIGS]} <= names
    assert not [name for name in names if name.endswith(".pth") and "/" not in name]
