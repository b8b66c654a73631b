from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import layers

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "ckptsync"
SOURCES = sorted(PACKAGE.rglob("*.py"))


def dotted(path: Path) -> str:
    """``formats.dcp`` for ckptsync/layouts/dcp.py; a folder's ``__init__`` is the folder."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def graph_of_imports() -> dict[str, frozenset[str]]:
    modules = {dotted(path) for path in SOURCES}
    found = {}
    for path in SOURCES:
        names = {
            n.removeprefix("ckptsync").removeprefix(".")
            for n in layers.imports(path.read_text())
            if n.split(".")[0] == "ckptsync"
        }
        found[dotted(path)] = frozenset(names & modules - {"", dotted(path)})
    return found


def test_a_module_imports_only_what_it_may() -> None:
    found = {dotted(path): layers.problems(dotted(path), path.read_text()) for path in SOURCES}
    assert {module: problems for module, problems in found.items() if problems} == {}


def test_no_modules_import_each_other() -> None:
    assert layers.cycles(graph_of_imports()) == []


def test_the_tables_name_only_what_is_there() -> None:
    modules = [dotted(path) for path in SOURCES]
    assert set(layers.NOT_PURE) <= set(modules)
    for pattern in layers.PURE:
        assert any(layers._matches(module, (pattern,)) for module in modules), pattern


def test_every_package_has_a_docstring() -> None:
    assert [
        p for p in SOURCES if p.name == "__init__.py" and not p.read_text().startswith('"""')
    ] == []


BAD = {
    "an upward import": ("layouts.dcp", "from ckptsync.merge.plan import plan"),
    "an upward import within a function": (
        "records.names",
        "def f():\n    import ckptsync.catalogue.uncached",
    ),
    "an upward import of a package": ("worker.snapshot", "from ckptsync import daemon"),
    "the base looking up": ("tensors", "from ckptsync.formats import dcp"),
    "a sibling role": ("worker.snapshot", "from ckptsync.head import sealing"),
    "a sibling port": ("checkpoint_dirs", "import ckptsync.spool"),
    "sibling packages above": ("hooks.hf", "from ckptsync.service.periodic import tick"),
    "a package that is not in the table": ("helpers.strings", ""),
    "a relative import": ("layouts.dcp", "from . import inert"),
    "torch in the core": ("merge.cast", "import torch"),
    "torch within a function of a role": (
        "head.consolidating",
        "def f():\n    from torch import nn",
    ),
    "torch in another module of the verifier": ("verify.levels", "import torch.nn"),
    "safetensors' library": ("formats.safetensors", "from safetensors import safe_open"),
    "ray in a role": ("head.consolidating", "import ray"),
    "transformers in the command line": ("cli.demo", "import transformers"),
    "pickle": ("verify.load_child", "import pickle"),
    "pickle's Unpickler": ("formats.pickles", "from pickle import Unpickler"),
    "marshal": ("layouts.dcp", "import marshal"),
    "shelve": ("spool", "import shelve"),
    "dill": ("hooks.hf", "import dill"),
    "cloudpickle": ("hooks.ray", "from cloudpickle import loads"),
    "an unsafe torch.load": ("verify.load_child", "import torch\ntorch.load(f)"),
    "torch.load with weights_only=False": (
        "hooks.hf",
        "import torch\ntorch.load(f, weights_only=False)",
    ),
    "numpy's pickles": ("merge.cast", "import numpy as np\nnp.load(f, allow_pickle=True)"),
    "yaml's objects": ("config.loading", "import yaml\nyaml.load(text)"),
    "eval": ("layouts.dcp", "eval('1')"),
    "a computed import": ("layouts.registry", "import importlib\nimportlib.import_module(x)"),
    "fsspec in a role": ("worker.snapshot", "import fsspec"),
    "s3fs in the command line": ("cli.push", "from s3fs import S3FileSystem"),
    "botocore in the configuration": ("config.loading", "import botocore.session"),
    "apscheduler in a role": (
        "worker.tick",
        "from apscheduler.schedulers.background import BackgroundScheduler",
    ),
    "watchdog in the daemon": ("service.run", "import watchdog.events"),
    "the file system in a format": ("layouts.dcp", "from pathlib import Path"),
    "a clock in a record": ("records.manifest", "import time"),
    "a clock by datetime": ("records.manifest", "from datetime import datetime\ndatetime.now()"),
    "chance in a plan": ("merge.plan", "import random"),
    "chance by numpy": ("merge.cast", "import numpy as np\nnp.random.default_rng()"),
    "threads in policy": ("worker.finished", "from threading import Thread"),
    "a process in a format": ("layouts.zero", "import subprocess"),
    "the network in a record": ("records.names", "import socket"),
    "an open file in a format": ("layouts.peft", "open('x')"),
    "printing in a plan": ("merge.plan", "print('x')"),
    "a real directory in policy": (
        "worker.finished",
        "from ckptsync.stores.posix.store import PosixStore",
    ),
}
GOOD = {
    "a downward import": (
        "merge.plan",
        "from ckptsync.formats.dtypes import size\nfrom ckptsync.tensors import Extent",
    ),
    "an import within the package": ("stores.posix.store", "from ckptsync.stores import liveness"),
    "the version": ("cli.main", "from ckptsync import __version__"),
    "torch in the verifier's child": (
        "verify.load_child",
        "import torch\ntorch.load(f, weights_only=True)",
    ),
    "torch in a hook": ("hooks.hf", "import torch"),
    "fsspec in a store": ("stores.s3.store", "import fsspec"),
    "a clock in a role that does": ("worker.tick", "import time\ntime.time()"),
    "parsing a URL": ("records.names", "from urllib.parse import quote"),
    "the installed version": ("config.schema", "from importlib.metadata import version"),
}


@pytest.mark.parametrize(("module", "source"), BAD.values(), ids=BAD)
def test_the_checker_sees(module: str, source: str) -> None:
    assert layers.problems(module, source) != []


@pytest.mark.parametrize(("module", "source"), GOOD.values(), ids=GOOD)
def test_the_checker_allows(module: str, source: str) -> None:
    assert layers.problems(module, source) == []


def test_the_checker_sees_cycles_of_any_length() -> None:
    none = frozenset[str]()
    assert layers.cycles({"a": frozenset("b"), "b": frozenset("c"), "c": none}) == []
    assert layers.cycles({"a": frozenset("b"), "b": frozenset("a"), "c": frozenset("a")}) == [
        ("a", "b")
    ]
    assert layers.cycles({"a": frozenset("b"), "b": frozenset("c"), "c": frozenset("a")}) == [
        ("a", "b", "c")
    ]


HEAVY = {
    "torch",
    "numpy",
    "transformers",
    "safetensors",
    "ray",
    "fsspec",
    "s3fs",
    "botocore",
    "apscheduler",
    "watchdog",
    "rich",
}


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "from ckptsync.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as e: assert not e.code\n"
        "print(*{m.partition('.')[0] for m in sys.modules}, file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout.lower()
    assert HEAVY & set(done.stderr.split()) == set()


def test_worker_head_merge_and_verify_import_no_torch() -> None:
    """As many of their modules as there are, but for the verifier's child, which is another
    process.
    """
    modules = [
        f"ckptsync.{dotted(p)}"
        for p in SOURCES
        if dotted(p).partition(".")[0] in ("worker", "head", "merge", "verify", "service")
    ]
    names = [m for m in modules if m != "ckptsync.verify.load_child"]
    program = (
        "import importlib, sys\n"
        f"for m in {names!r}: importlib.import_module(m)\n"
        "print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert {"torch", "safetensors", "transformers", "deepspeed", "ray", "fsspec"} & set(
        done.stdout.split()
    ) == set()


@pytest.mark.parametrize(
    "package",
    # the modules of cli are commands
    sorted({p.parent.name for p in PACKAGE.glob("*/__init__.py")} - {"cli", "demo_data"}),
)
def test_the_docstring_of_a_package_names_each_of_its_modules(package: str) -> None:
    folder = PACKAGE / package
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert modules <= set(re.findall(r"`(\w+)`", text))
