"""The benchmarks are run by hand: here it is only seen that each of them can begin."""

from importlib import import_module
from pathlib import Path

from tests.support.exhaustive import ALL


def test_every_benchmark_finds_what_it_imports() -> None:
    files = sorted((Path(__file__).parent.parent / "benchmarks").glob("*.py"))
    assert len(files) > 20
    for file in files:
        if ALL or "import torch" not in file.read_text():  # torch takes two seconds
            import_module(f"benchmarks.{file.stem}")
