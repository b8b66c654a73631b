"""The files of the page: what a reader, a store's names and the one-file page rely on."""

import re
from pathlib import Path

import pytest

import ckptsync

FOLDER = Path(ckptsync.__file__).parent / "web" / "static"
MODULES = sorted(FOLDER.glob("*.js"))
MARKUP = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function")
IMPORT = re.compile(r"^import (?:type )?\{[^}]*\} from \"\./([\w-]+\.js)\";$")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_a_module_is_short_loads_only_its_neighbours_and_makes_no_markup_of_text(
    path: Path,
) -> None:
    assert not MARKUP.search(path.read_text())
    lines = path.read_text().splitlines()
    assert len(lines) < 300
    imports = [line for line in lines if line.startswith("import ")]
    names = [match[1] for line in imports if (match := IMPORT.match(line))]
    assert len(names) == len(imports)
    assert {FOLDER / name for name in names} <= set(MODULES)


def test_the_page_names_nothing_of_another_machine() -> None:
    for path in FOLDER.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|url\(", text), path.name


def test_each_text_has_two_languages() -> None:
    text = (FOLDER / "strings.js").read_text()
    table = text[text.index("const STRINGS = {") : text.index("\n};")]
    entries = re.findall(r'\[\s*"((?:[^"\\]|\\.)*)",\s*"((?:[^"\\]|\\.)*)",?\s*\]', table)
    assert len(entries) == len(re.findall(r"^  [\"\w-]+: \[", table, re.MULTILINE)) > 100
    for english, chinese in entries:
        assert set(re.findall(r"\$\d", english)) == set(re.findall(r"\$\d", chinese)), english
        assert not re.search(r"[a-z][A-Z][a-z]", english), "a name of the code"
