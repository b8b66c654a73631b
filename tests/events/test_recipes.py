"""The recipes of docs/events.md, as they are written there but for where programs lie.

`lm_eval`, `hf` and `modelscope` are stand-ins that check their command lines and write what the
real ones do; transformers, rsync and curl are real.
"""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from ckptsync.cli.main import main
from ckptsync.config.yaml_lines import parse
from tests.support.exhaustive import in_exhaustive
from tests.support.run_documents import ROOT, TRAINERS, has
from tests.support.small_store import make
from tests.support.webhook_server import hook

PAGE = (ROOT / "docs/events.md").read_text()
RECIPES = {
    event["name"]: event
    for block in re.findall(r"(?s)```yaml\n(.*?)```", PAGE.partition("## Recipes")[2])
    for event in parse(block, "docs/events.md").values["events"]  # type: ignore[index]
}
STAND_IN = """#!/bin/sh
echo "$(basename $0)|$*" >>{told}
"""
LM_EVAL = (
    STAND_IN
    + """while [ $# -gt 1 ]; do
    case $1 in --output_path) out=$2;; esac
    shift
done
mkdir -p $out/a__b
echo '{{"results": {{"arc_easy": {{"acc,none": 0.25, "alias": "arc_easy"}}}}}}' \
    >$out/a__b/results_2026-01-01T00-00-00.json
"""
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("made") / "store")


class Recipe:
    """A recipe in a store with one verified checkpoint, and where its programs lie."""

    def __init__(self, made: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.home, self.told, self._capsys = home, home / "told", capsys
        self.store = shutil.copytree(made, home / "store")
        self.model = self.store / "fsdp2/consolidated/checkpoint-4"

    def program(self, name: str, script: str = STAND_IN) -> str:
        path = self.home / name
        path.write_text(script.format(told=self.told))
        path.chmod(0o755)
        return str(path)

    def run(self, name: str, places: Mapping[str, str]) -> dict[str, float]:
        text = yaml.safe_dump([RECIPES[name] | {"on": ["verified"]}], width=10_000)
        for old, new in places.items():
            assert old in text, old
            text = text.replace(old, new)
        config = self.home / "head.yaml"
        config.write_text(f"roles: [head]\nstore: {{url: {self.store}}}\nevents:\n{text}")
        words = ["events", "run", "fsdp2/checkpoint-4", name, "-c", str(config), "--json"]
        assert main(words) == 0
        [event] = json.loads(self._capsys.readouterr().out)["events"]
        assert event["note"] == ""
        return event["metrics"]  # type: ignore[no-any-return]


@pytest.fixture
def recipe(
    made: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Recipe:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return Recipe(made, tmp_path, capsys)


def needs(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not installed")
    return path


def test_lm_eval_gives_a_metric(recipe: Recipe) -> None:
    needs("jq")
    program = recipe.program("lm_eval", LM_EVAL)
    assert recipe.run("eval", {"/opt/eval/bin/lm_eval": program}) == {"eval/acc": 0.25}
    [line] = recipe.told.read_text().splitlines()
    wanted = f"lm_eval|--model hf --model_args pretrained={recipe.model} --tasks arc_easy"
    assert line.startswith(f"{wanted} --output_path ")
    assert not Path(line.split()[-1]).exists()


@in_exhaustive
def test_transformers_opens_the_model(recipe: Recipe) -> None:
    if lacking := has("transformers torch"):
        pytest.skip(f"{TRAINERS} has no {lacking}")
    recipe.run("opens", {"/opt/train/bin/python": TRAINERS})


@pytest.mark.parametrize(
    ("name", "program", "more"), [("hub", "hf", " . --private"), ("modelscope", "modelscope", "")]
)
def test_hubs_get_the_model(recipe: Recipe, name: str, program: str, more: str) -> None:
    recipe.run(name, {f"/opt/hub/bin/{program}": recipe.program(program)})
    assert recipe.told.read_text() == f"{program}|upload my-team/fsdp2 {recipe.model}{more}\n"


def test_rsync_copies_the_model(recipe: Recipe) -> None:
    copy = recipe.home / "backup"
    recipe.run("copy", {"/usr/bin/rsync": needs("rsync"), "/backup": str(copy)})
    copied = copy / "fsdp2/checkpoint-4"
    files = sorted(path.name for path in recipe.model.iterdir())
    assert sorted(path.name for path in copied.iterdir()) == files
    assert all((copied / f).read_bytes() == (recipe.model / f).read_bytes() for f in files)


def test_curl_tells_vllm_to_load_an_adapter(recipe: Recipe) -> None:
    with hook() as server:
        recipe.run(
            "vllm",
            {"/usr/bin/curl": needs("curl"), "http://127.0.0.1:8000": server.url},
        )
        path, _, document = server.taken.get(timeout=60)
    assert path == "/v1/load_lora_adapter"
    assert document == {"lora_name": "fsdp2-4", "lora_path": str(recipe.model)}


def test_every_recipe_is_run_here() -> None:
    assert set(RECIPES) == {"eval", "opens", "hub", "modelscope", "copy", "vllm"}
