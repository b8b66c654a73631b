from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from importlib.util import find_spec
from pathlib import Path

import pytest

from ckptsync.cli.main import main
from ckptsync.hooks import ray
from tests.support.exhaustive import in_exhaustive
from tests.support.stand_in_programs import CLEAN, ROOT, STAND_IN, ran

# torch's, and those of the command
PACKAGES = [Path(path) for path in sys.path if path.endswith("site-packages")]
LINE = ROOT / "ckptsync" / "hooks" / "autoload.pth"
MADE = "print(*(type(c).__name__ for c in t.Trainer('out').callback_handler.callbacks))"
APPENDED = f"import transformers.trainer as t; {MADE}"
OURS = (
    "import sys; print(*sorted(m for m in sys.modules if m.startswith(('ckptsync',"
    " 'transformers'))), any('_Awaiting' in repr(f) for f in sys.meta_path))"
)


class Environment:
    """A Python that finds the packages of these directories; the line is to be installed."""

    def __init__(self, folder: Path, *packages: Path) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.python = str(folder / "bin" / "python")
        (self.site,) = folder.glob("lib/python*/site-packages")
        (self.site / "above.pth").write_text("".join(f"{path}\n" for path in packages))

    def ran(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return ran(*words, python=self.python, path=(), cwd=ROOT, **variables)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    made = Environment(tmp_path_factory.mktemp("environment"), ROOT, STAND_IN, *PACKAGES)
    assert main(["hook", "install", "--python", made.python]) == 0
    return made


BOTH = ["Flow", "DefaultCallback"]


@pytest.mark.parametrize("value", [None, "", "0", "false", "No", "off", "1", "true", "yes"])
def test_the_variable_says_whether_trainers_have_the_hook(
    environment: Environment, value: str | None
) -> None:
    variables = {} if value is None else {"CKPTSYNC_AUTOLOAD": value}
    expected = BOTH if value in ("1", "true", "yes") else ["Flow"] if value else ["False"]
    done = environment.ran("-c", APPENDED if value else OURS, **variables)
    # without a value nothing of ours is imported
    assert (done.stdout.split(), done.stderr) == (expected, "")


def test_until_a_trainer_is_imported_only_a_finder_is_there(environment: Environment) -> None:
    *modules, waits = environment.ran("-c", OURS, CKPTSYNC_AUTOLOAD="1").stdout.split()
    assert (modules, waits) == (["ckptsync", "ckptsync.hooks", "ckptsync.hooks.autoload"], "True")
    done = environment.ran("-c", f"import transformers.trainer; {OURS}", CKPTSYNC_AUTOLOAD="1")
    assert done.stdout.split()[-1] == "False", "it goes when it has done its work"


def test_an_isolated_python_has_the_hook_and_one_without_packages_not(
    environment: Environment,
) -> None:
    assert environment.ran("-I", "-c", APPENDED, CKPTSYNC_AUTOLOAD="1").stdout.split() == BOTH
    done = environment.ran("-S", "-c", OURS, CKPTSYNC_AUTOLOAD="1")
    assert (done.stdout.split(), done.stderr) == (["False"], "")


def test_processes_that_a_process_starts_have_the_hook(environment: Environment) -> None:
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {APPENDED!r}])"
    assert environment.ran("-c", program, CKPTSYNC_AUTOLOAD="1").stdout.split() == BOTH


@in_exhaustive
def test_every_rank_of_torchrun_has_the_hook(environment: Environment, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(APPENDED)
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = environment.ran(*launch, str(tmp_path / "train.py"), CKPTSYNC_AUTOLOAD="1")
    said = done.stdout  # of two processes at once: one may write between the words of the other
    assert (said.count("Flow"), said.count("DefaultCallback")) == (2, 2), done.stderr


INSTALL = "from ckptsync.hooks.autoload import install; install(); install()"


FINDER = """
import importlib.util, sys
class Other:
    inside = False
    def find_spec(self, name, path=None, target=None):
        if name != "transformers.trainer" or self.inside:
            return None
        self.inside = True
        spec = importlib.util.find_spec(name)
        self.inside = False
        return spec
"""
WAIT = "sys.meta_path.insert(0, Other())"
LOOK = "import importlib.util; importlib.util.find_spec('transformers.trainer')"
HANDLER = (
    f"from transformers.trainer import CallbackHandler as taken, Flow; {INSTALL};"
    " first = taken([Flow], None, None, None, None); taken = taken(first.callbacks, *[None] * 4);"
    " print(*(type(c).__name__ for c in taken.callbacks))"
)
REBOUND = f"{INSTALL}; import transformers.trainer as t; t.DEFAULT_CALLBACKS = [t.Flow]; {MADE}"
COUNT = "import sys; assert sum(type(f).__name__ == '_Awaiting' for f in sys.meta_path) == 1"
SECOND = (
    "from ckptsync.hooks.autoload import _Awaiting; sys.meta_path.insert(0, _Awaiting(lambda"
    " module: None))"
)
PROGRAMS = {
    "for which two finders of ours wait": f"{INSTALL}\n{COUNT}\n{SECOND}\n{APPENDED}",
    "called twice before": f"{INSTALL}; {APPENDED}",
    "called twice behind": f"import transformers.trainer; {INSTALL}; {APPENDED}; {INSTALL}",
    "whose handler somebody has taken before, and makes again of its callbacks": HANDLER,
    "whose default callbacks somebody replaces, as ms-swift": REBOUND,
    "for which another finder waits before": f"{FINDER}{WAIT}\n{INSTALL}\n{APPENDED}",
    "for which another finder waits behind": f"{FINDER}{INSTALL}\n{WAIT}\n{APPENDED}",
    "which somebody only looks for": f"{INSTALL}; {LOOK}; {LOOK}; {APPENDED}",
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_every_trainer_of_a_process_has_the_hook_once(program: str) -> None:
    done = ran("-c", program, CKPTSYNC_AUTOLOAD="1")
    assert done.stdout.split() == BOTH, done.stderr


OLDER = {"ckptsync/__init__.py": "", "ckptsync/hooks/__init__.py": ""}
BROKEN = {
    "of which nothing is there": {},
    "of an older version": OLDER,
    "half written": {**OLDER, "ckptsync/hooks/autoload.py": "def begin(:\n"},
}


@pytest.mark.parametrize("files", BROKEN.values(), ids=BROKEN)
def test_a_broken_installation_breaks_no_python_and_says_so(
    tmp_path: Path, files: dict[str, str]
) -> None:
    for name, text in files.items():
        (tmp_path / "packages" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "packages" / name).write_text(text)
    environment = Environment(tmp_path / "environment", tmp_path / "packages")
    shutil.copy(LINE, environment.site)
    done = environment.ran("-c", "print('fine')")
    assert (done.stdout, done.stderr) == ("fine\n", "")
    done = environment.ran("-c", "print('fine')", CKPTSYNC_AUTOLOAD="1")
    assert (done.returncode, done.stdout) == (0, "fine\n")
    # Python 3.11 reads the lines of a virtual environment twice
    (line,) = set(done.stderr.splitlines())
    assert "CKPTSYNC_AUTOLOAD is set, but the hook cannot be loaded: " in line
    script = f"{environment.python} -c \"print('fine')\" 2>&-"
    env = {**CLEAN, "CKPTSYNC_AUTOLOAD": "1"}
    assert subprocess.check_output(["sh", "-c", script], env=env, text=True) == "fine\n"


TRAINERS = {
    "that has no handler": ("Trainer = object\n", "print(t.Trainer)", "CallbackHandler"),
    "whose handler has no callbacks": (
        "class CallbackHandler: pass\n",
        "t.CallbackHandler(); print('made')",
        "no attribute 'callbacks'",
    ),
    "that cannot be imported": ("import nothing_such\n", "", "No module named 'nothing_such'"),
}


@pytest.mark.parametrize(("source", "then", "said"), TRAINERS.values(), ids=TRAINERS)
def test_a_trainer_loads_as_without_us(tmp_path: Path, source: str, then: str, said: str) -> None:
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text("class TrainerCallback: pass\n")
    (tmp_path / "transformers" / "trainer.py").write_text(source)
    program = f"import transformers.trainer as t; {then}"
    plain, with_us = (
        ran("-c", first + program, path=(tmp_path, ROOT)) for first in ("", f"{INSTALL}; ")
    )
    assert (with_us.returncode, with_us.stdout) == (plain.returncode, plain.stdout)
    assert said in with_us.stderr


def test_a_loader_that_cannot_be_followed_loads_as_without_us(tmp_path: Path) -> None:
    (tmp_path / "transformers" / "trainer").mkdir(parents=True)
    (tmp_path / "transformers" / "__init__.py").touch()
    program = f"{INSTALL}; import transformers.trainer as t; print(t.__name__)"
    done = ran("-c", program, path=(tmp_path, ROOT))
    assert (done.returncode, done.stdout) == (0, "transformers.trainer\n"), done.stderr
    assert "the hook cannot be installed: NoneType loads it" in done.stderr


def test_a_trainer_that_tells_nobody_of_its_saves_is_named(tmp_path: Path) -> None:
    (tmp_path / "llamafactory" / "v1").mkdir(parents=True)
    (tmp_path / "llamafactory" / "v1" / "launcher.py").write_text("print('launched')")
    done = ran("-c", f"{INSTALL}; from llamafactory.v1 import launcher", path=(tmp_path, ROOT))
    assert (done.returncode, done.stdout) == (0, "launched\n")
    assert done.stderr.count("LLaMA-Factory v1 runs no callback for intermediate checkpoints") == 1


@pytest.mark.skipif(find_spec("transformers") is not None, reason="they are here")
def test_transformers_that_are_not_there_are_not_there_with_us_either() -> None:
    begin = f"import sys; sys.path.insert(0, {str(ROOT)!r})"
    done = ran("-I", "-c", f"{begin}; {INSTALL}; import transformers.trainer", path=())
    assert (done.returncode, "No module named 'transformers'" in done.stderr) == (1, True)


# --- Ray's workers

SETUP = """
import sys
from ckptsync.hooks.ray import setup_worker
assert not {"ray", "transformers", "torch", "msgspec", "numpy"} & set(sys.modules), \
sorted(sys.modules)
before = len(sys.meta_path)
setup_worker(); setup_worker()
print(len(sys.meta_path) - before)
"""


def test_a_ray_worker_is_set_up_once_and_imports_nothing_for_it() -> None:
    assert ran("-c", SETUP, path=(ROOT,)).stdout.strip() == "1"


def test_no_other_name_for_ray_is_made_up() -> None:
    with pytest.raises(AttributeError, match="no attribute 'CkptSync'"):
        _ = ray.CkptSync
