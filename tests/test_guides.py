"""The guides, the tutorials and both READMEs: every command is one, every configuration loads,
every link leads somewhere, and what can be run is run.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import get_args

import pytest
import yaml

from ckptsync.config.loading import read
from ckptsync.config.schema import SECTIONS
from tests.support.exhaustive import in_exhaustive
from tests.support.run_documents import (
    GUIDES,
    READMES,
    ROOT,
    TUTORIAL,
    TUTORIAL_ZH,
    Block,
    blocks,
    has,
    location,
)

MARKS = {"run", "until", "serve", "output", "file", "fragment", "picture", "not run"}
PAGES = [*GUIDES, TUTORIAL]
DOCUMENTS = [*READMES, *PAGES, TUTORIAL_ZH]
TRANSLATED = [tuple(READMES), (TUTORIAL, TUTORIAL_ZH)]
CHINESE = [READMES[1], *sorted((ROOT / "docs").rglob("*.zh.md"))]
TRAIN = (
    "accelerate.md",
    "hf-trainer.md",
    "torch.md",
    "tutorial.md",
)  # their trainings take 10 s and more
RUN = [path for path in PAGES if any(b.mark == "run" for b in blocks(path.read_text()))]


def name(value: object) -> str:
    return str(value.relative_to(ROOT)) if isinstance(value, Path) else str(value)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_a_comment_says_of_every_block_what_it_is(path: Path) -> None:
    unknown = [
        b.line
        for b in blocks(path.read_text())
        if b.mark not in MARKS or (b.mark in ("file", "until", "not run") and not b.about)
    ]
    assert unknown == []


def ours(block: Block) -> bool:
    told = yaml.safe_load(block.text) if block.language == "yaml" else None
    return isinstance(told, dict) and bool({*SECTIONS, "roles"} & told.keys())


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_every_configuration_of_ours_loads(path: Path) -> None:
    for block in filter(ours, blocks(path.read_text())):
        read(block.text, f"{path}:{block.line}", {})


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_a_file_says_its_name_where_it_is_read(path: Path) -> None:
    """The comment before it is not seen."""
    assert [
        b.about
        for b in blocks(path.read_text())
        if b.mark == "file" and not b.text.startswith(f"# {b.about}\n")
    ] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_every_script_is_python(path: Path) -> None:
    for block in blocks(path.read_text()):
        if block.language == "python":
            compile(block.text, f"{path}:{block.line}", "exec")


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_every_link_leads_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)]+)\)", path.read_text())
    lost = [
        link
        for link in links
        if "://" not in link and not (path.parent / link.partition("#")[0]).exists()
    ]
    assert links
    assert lost == []


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=in_exhaustive if path.name in TRAIN else ()) for path in RUN],
    ids=name,
)
def test_a_guide_does_what_it_says(path: Path, tmp_path: Path) -> None:
    found = blocks(path.read_text())
    for block in found:
        missing = has(block.about) if block.mark == "run" and block.about else ""
        if missing:
            pytest.skip(f"line {block.line} wants {missing}")
    with location(tmp_path) as here:
        for block in found:
            here.do(block)


@pytest.mark.parametrize("number", range(2))
def test_the_readme_merges_shards_as_it_says(number: int, tmp_path: Path) -> None:
    block = [b for b in blocks(READMES[0].read_text()) if b.about == "on shards"][number]
    with location(tmp_path) as here:
        here.lay_shards()
        here.do(block)
    assert (tmp_path / "work" / "merged" / "model.safetensors").is_file()


def test_every_guide_is_named_in_both_readmes() -> None:
    for path in READMES:
        linked = set(re.findall(r"\]\(docs/guides/([^)]+)\)", path.read_text()))
        assert linked == {p.name for p in GUIDES}


def told(path: Path) -> list[tuple[str, str]]:
    """The blocks of a document without what their comments say, which is of its language."""
    return [(b.mark, re.sub(r" +#.*", "", b.text)) for b in blocks(path.read_text())]


@pytest.mark.parametrize("pair", TRANSLATED)
def test_a_translation_has_the_same_blocks_in_the_same_order(pair: tuple[Path, Path]) -> None:
    english, chinese = map(told, pair)
    assert chinese == english
    assert len(english) >= 5


def prose(text: str) -> str:
    """A document without its blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def words_that_stay(text: str) -> list[set[str]]:
    """What no language changes, by section: links to pages, and what stands in code."""
    sections = re.split(r"^## ", prose(text).replace(".zh.md", ".md"), flags=re.MULTILINE)
    words = [re.findall(r"\]\(([^)#]+)[^)]*\)|`([^`]+)`", section) for section in sections]
    return [{"".join(word).replace("\n", " ") for word in found} for found in words]


@pytest.mark.parametrize("pair", TRANSLATED)
def test_a_translation_names_the_same_words_in_each_section(pair: tuple[Path, Path]) -> None:
    english, chinese = (words_that_stay(path.read_text()) for path in pair)
    assert len(chinese) == len(english)
    for number, section in enumerate(english):
        assert chinese[number] == section, f"section {number}"


@pytest.mark.parametrize("path", CHINESE, ids=name)
def test_chinese_text_has_full_width_punctuation_and_a_space_beside_latin_words(path: Path) -> None:
    """A line break between two characters would show as a space."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)|\*\*|<[^>]*>", r"\1", prose(path.read_text()))
    han, latin = "[\u4e00-\u9fff]", r"[\w`](?<![\u4e00-\u9fff])"
    wrong = rf"{han}(?:{latin}|[,.:;!?()\"]|\n{han})|(?:{latin}|[,:;!?()\"]){han}"
    assert re.findall(rf".*(?:{wrong}).*", text) == []


def test_the_documented_exit_codes_are_those_of_the_errors() -> None:
    from ckptsync import errors

    codes = {
        str(error.exit_code)
        for error in vars(errors).values()
        if isinstance(error, type) and issubclass(error, errors.CkptsyncError)
    }
    text = (ROOT / "docs" / "cli.md").read_text()
    cells = re.findall(r"^\| (\d[\d, ]*) \|", text, re.MULTILINE)
    assert codes <= {code.strip() for cell in cells for code in cell.split(",")}


def test_every_status_and_alarm_has_a_row_of_what_to_do() -> None:
    from ckptsync.records.location_status import Status
    from ckptsync.status.alarms import CODES

    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    first_cells = " ".join(re.findall(r"^\| ([^|]+) \|", text, re.MULTILINE))
    named = set(re.findall(r"[A-Z]{2,}", first_cells)) | set(re.findall(r"`([\w-]+)`", first_cells))
    assert {*get_args(Status), *CODES} <= named


def test_every_message_of_the_page_is_one_of_the_program() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text().partition("## Messages")[2]
    shown = re.findall(r"^\| `([^`]+)`", text, re.MULTILINE)
    constants = [
        node.value
        for path in (ROOT / "ckptsync").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    parts = {part.strip() for message in shown for part in message.split("…")}
    lost = [p for p in parts if not any(p in constant for constant in constants)]
    assert len(shown) > 40
    assert lost == []
