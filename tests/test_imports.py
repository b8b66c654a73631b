"""What is imported when, and what the packages say of themselves; .importlinter says who may import
whom.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "ckptsync"
SOURCES = sorted(PACKAGE.rglob("*.py"))


def dotted(path: Path) -> str:
    """``layouts.dcp`` for ckptsync/layouts/dcp.py; a folder's ``__init__`` is the folder."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_worker_head_merge_and_verify_import_no_torch() -> None:
    """As many of their modules as there are, but for the verifier's child, which is another
    process.
    """
    modules = [
        f"ckptsync.{dotted(p)}"
        for p in SOURCES
        if dotted(p).partition(".")[0] in ("worker", "head", "merge", "verify", "service")
    ]
    names = [m for m in modules if m != "ckptsync.verifier.load_child"]
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
