"""The command line as a whole: help, exit codes, the error boundary."""

import errno
import json
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptsync import __version__
from ckptsync.cli.commands import COMMANDS, GROUPS
from ckptsync.cli.main import bounded, main, parser
from ckptsync.errors import ConfigError, Corrupt, Incomplete, NotFound, StoreError, Unsupported
from tests.cli.test_json import check
from tests.support.command_line import Cli


def raising(error: BaseException) -> Callable[[], int]:
    def command() -> int:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError, 2),
        (Incomplete, 3),
        (StoreError, 4),
        (NotFound, 4),
        (Unsupported, 5),
        (Corrupt, 10),
    ],
)
def test_an_operators_error_is_two_lines_and_its_exit_code(
    error: type[ConfigError], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bounded(raising(error("x: wanted y", hint="do z"))) == code
    assert capsys.readouterr() == ("", "ckptsync: error: x: wanted y\nckptsync: hint: do z\n")
    assert bounded(raising(error("x")), as_json=True) == code
    assert json.loads(capsys.readouterr().err) == {
        "format": 1,
        "error": "x",
        "hint": "",
        "exit_code": code,
    }


def test_a_full_disk_is_an_error_and_a_bug_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert bounded(raising(OSError(28, "No space left on device", "/mnt/x"))) == 4
    assert capsys.readouterr().err.startswith("ckptsync: error: /mnt/x: No space left on device\n")
    thread = RuntimeError("can't start new thread")
    for scarce in (MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory"), thread):
        assert bounded(raising(scarce)) == 1
        assert "ckptsync: hint: " in capsys.readouterr().err
    with pytest.raises(ZeroDivisionError):
        bounded(raising(ZeroDivisionError()))


def test_an_interrupt_is_130_without_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert bounded(raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr() == ("", "")


def test_termination_unwinds_so_that_unfinished_output_is_removed() -> None:
    cleaned = []

    def command() -> int:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            cleaned.append(True)
        return 0

    with pytest.raises(SystemExit) as ended:
        bounded(command)
    assert (ended.value.code, cleaned) == (143, [True])
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize(
    ("line", "why", "hint"),
    [
        ("", "no command is given", "ckptsync --help"),
        ("verfy /s", "verfy: no such command", "did you mean verify?"),
        ("nonsense", "nonsense: no such command", "ckptsync --help"),
        ("--store /s", "--store: an option comes after its command", "ckptsync --help"),
        ("merge only-one", "required: DST", "ckptsync help merge"),
        ("run", "required: -c/--config", "ckptsync help run"),
        ("merge a b --dtype int8", "'int8' is none of auto, keep, bf16", "ckptsync help merge"),
        ("merge a b --dtype fp6", "'fp6' is none of", "did you mean fp16?"),
        ("ls --stroe /s", "--stroe: no such option of `ckptsync ls`", "did you mean --store?"),
        ("gc --keep-lst=3", "--keep-lst: no such option", "did you mean --keep-last?"),
        ("hook instal", "'instal' is none of install", "did you mean install?"),
        ("merge a b --dry", "--dry: no such option of `ckptsync merge`", "did you mean --dry-run?"),
        ("service", "ACTION", "ckptsync help service"),
        ("ls a b", "a b: expected one RUN", "`ckptsync ls` lists"),
        ("help retenton", "retenton: no such topic", "did you mean retention?"),
        ("help merg", "merg: no such topic", "did you mean merge?"),
        ("config example worke", "worke: no such example", "did you mean worker?"),
    ],
)
def test_wrong_usage_is_2_with_a_hint_also_as_json(
    line: str, why: str, hint: str, cli: Cli
) -> None:
    out, err = cli(*line.split(), code=2)
    error, hinted = err.splitlines()
    assert (out, why in error, hint in hinted) == ("", True, True), err
    if line:
        out, err = cli(*line.split(), "--json", code=2)
        printed = json.loads(err)
        check("error", printed)
        assert (out, printed["exit_code"]) == ("", 2)
        assert why in printed["error"]
        assert hint in printed["hint"]


def test_the_overview_names_every_command_by_purpose(cli: Cli) -> None:
    said = cli("--help").out
    assert all(f"\n  {name} " in said for name in COMMANDS)
    assert all(f"\n{purpose}:\n" in said for purpose in GROUPS)
    assert max(map(len, said.splitlines())) <= 100


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_tells_what_the_command_does_and_two_examples(
    command: str, cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0
    assert "--json" in said
    assert COMMANDS[command].summary[1:] in " ".join(said.split())
    for example in COMMANDS[command].examples:
        assert f"\n  ckptsync {example}\n" in said
        words = shlex.split(example.partition(" > ")[0])
        assert words[0] == command
        parser(command).parse_args(words[1:])
    assert cli("help", command).out.startswith(said)


def test_the_exit_codes_stand_on_one_page(cli: Cli) -> None:
    assert "\n  10   corrupt" in cli("help", "exit-codes").out


@pytest.mark.parametrize("word", ["--version", "version"])
def test_the_version_is_told(word: str, cli: Cli) -> None:
    assert cli(word).out == f"ckptsync {__version__}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "tcsh"])
def test_a_shell_completes_commands_and_options(shell: str, cli: Cli) -> None:
    said = cli("completion", shell).out
    assert all(name in said for name in COMMANDS)
    assert "keep-last" in said
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=said, text=True, check=True)


def cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_help_answers_at_once_and_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from ckptsync.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'numpy', 'rich', 'yaml', "
        "'msgspec', 'blake3', 'apscheduler', 'asyncio'}))"
    )
    before = cpu_of_children()
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"
    assert cpu_of_children() - before < 1, "0.3 s are promised, on an idle machine"


def test_who_sends_or_watches_needs_no_arrays() -> None:
    code = (
        "import ckptsync.cli.push, ckptsync.worker.worker, sys; print(sorted({'numpy', 'torch'} &"
        " set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("asked", [None, "3"])
def test_numpy_starts_no_threads_and_other_programs_inherit_nothing(asked: str | None) -> None:
    code = (
        "import os; from ckptsync.cli import main; main.main(['merge', '/nowhere', '/tmp/never']);"
        " import sys; assert 'numpy' in sys.modules;"
    )
    code += "print(len(os.listdir('/proc/self/task')), os.environ.get('OPENBLAS_NUM_THREADS'))"
    own = {key: value for key, value in os.environ.items() if key != "OPENBLAS_NUM_THREADS"}
    environment = own if asked is None else own | {"OPENBLAS_NUM_THREADS": asked}
    told = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
    ).stdout.split()
    assert told[1] == str(asked)
    assert asked or told[0] == "1"


def test_what_an_error_or_a_warning_repeats_commands_no_terminal(tmp_path: Path) -> None:
    evil = "a\x1b[2J\u202e"
    program = (
        "import logging; from ckptsync.cli import main as m; m.main(['ls',"
        f" {str(tmp_path / evil)!r}]); logging.getLogger('ckptsync').warning({evil!r})"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stderr.splitlines()
    assert said[0].startswith("ckptsync: error: ")
    assert said[-1] == "ckptsync: a\\x1b[2J\\u202e"
    assert all(line.isprintable() for line in said)


@pytest.mark.parametrize("words", [["--help"], ["help", "formats"], ["inspect", "模型"]])
def test_a_terminal_that_lacks_a_character_gets_its_number(words: list[str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "ckptsync", *words],
        check=False,
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    text = (ended.stdout + ended.stderr).decode("ascii")
    assert "Traceback" not in text
    assert "\\u" in text
