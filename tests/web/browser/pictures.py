"""Write the pictures that the documents show, of the demo and of the page: `make pictures`.

A store is filled by real services, `ckptsync web` shows it, and Chromium takes the pictures.
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import quote

from rich.console import Console

from tests.support.waiting import until
from tests.web.browser.conftest import ARGUMENTS, DEADLINE
from tests.web.browser.demo_store import RUNS, training
from tests.web.browser.serving import web_command

if TYPE_CHECKING:
    from playwright.sync_api import Locator

SCHEMES: tuple[Literal["light"], Literal["dark"]] = ("light", "dark")
PAGES = {"overview": "/", "run": f"/runs/{quote(RUNS[0])}"}
SAVES = 16
SHOWN = "s3://checkpoints/team"  # instead of a temporary directory
RENAME = """([from, to]) => {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    walker.currentNode.nodeValue = walker.currentNode.nodeValue.replaceAll(from, to);
  }
}"""


def is_under_way(bar: Locator) -> bool:
    """Return whether a tenth of an upload is done."""
    value, most = (float(bar.get_attribute(name) or 0) for name in ("value", "max"))
    return value > most / 10


def record_demo(path: Path) -> None:
    """Write what `ckptsync demo` prints as an SVG of a terminal."""
    command = [sys.executable, "-m", "ckptsync", "demo"]
    result = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
    )
    text = re.sub(r"/\S*/ckptsync-demo-\w+", "/tmp/demo", result.stdout)
    lines = ["$ make demo", *text.partition("\ntry next:")[0].splitlines()]
    console = Console(record=True, width=120, file=io.StringIO())
    console.print("\n".join(lines), highlight=False, markup=False)
    console.save_svg(str(path), title="ckptsync")


def main(folder: Path) -> None:
    """Write the demo, and each page, light and dark, into a folder."""
    record_demo(folder / "demo.svg")
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory(prefix="pictures-") as temporary, sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=ARGUMENTS)
        directory = Path(temporary)
        with training(directory, SAVES) as trainings, web_command(Path(trainings.store.url)) as url:
            pages = {}
            for name, path in PAGES.items():
                for scheme in SCHEMES:
                    context = browser.new_context(
                        viewport={"width": 1180, "height": 700}, color_scheme=scheme, locale="en-US"
                    )
                    context.set_default_timeout(DEADLINE)
                    pages[f"{name}-{scheme}"] = context.new_page()
                    pages[f"{name}-{scheme}"].goto(url + path)
            for name, page in pages.items():
                bar = page.locator("progress[value]").first
                assert until(partial(is_under_way, bar), seconds=300, pause=0.2)
                page.evaluate(RENAME, [trainings.store.url, SHOWN])
                page.screenshot(path=str(folder / f"{name}.png"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
