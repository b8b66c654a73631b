"""The benchmarks are run by hand: here it is only seen that each of them can begin."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_benchmark_finds_what_it_imports() -> None:
    modules = [f"benchmarks.{path.stem}" for path in sorted((ROOT / "benchmarks").glob("*.py"))]
    assert len(modules) > 20
    program = f"import importlib; [importlib.import_module(name) for name in {modules}]"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
