"""The site of the documents: its navigation has every page, its generated pages are current."""

from __future__ import annotations

import re

import pytest

from tests.support.reference_pages import PAGES
from tests.support.stand_in_programs import ROOT


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_current(name: str) -> None:
    """`python -m tests.support.reference_pages NAME > docs/NAME.md` makes it."""
    assert (ROOT / f"docs/{name}.md").read_text("utf-8") == PAGES[name]()


def test_the_navigation_has_every_page_once() -> None:
    named = re.findall(r"docs/\S+\.md", (ROOT / "mkdocs.yml").read_text("utf-8"))
    pages = (ROOT / "docs").rglob("*.md")
    assert sorted(named) == sorted(page.relative_to(ROOT).as_posix() for page in pages)
