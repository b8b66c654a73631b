"""Write the pictures of the page that the documents show: `make pictures`.

A store is filled by real services, `ckptsync web` shows it, and Chromium takes the pictures.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from urllib.parse import quote

from tests.web.browser.conftest import ARGUMENTS, DEADLINE
from tests.web.browser.demo_store import RUNS, training
from tests.web.browser.serving import web_command

SIZE = {"width": 1180, "height": 700}
PAGES = {"overview": "/", "run": f"/runs/{quote(RUNS[0])}"}
SAVES = 24


def main(folder: Path) -> None:
    """Write each page, light and dark, into a folder."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory(prefix="pictures-") as temporary, sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=ARGUMENTS)
        directory = Path(temporary)
        with training(directory, SAVES) as trainings, web_command(Path(trainings.store.url)) as url:
            for name, path in PAGES.items():
                for scheme in ("light", "dark"):
                    context = browser.new_context(
                        viewport=SIZE,
                        color_scheme=scheme,  # type: ignore[arg-type]
                        locale="en-US",
                    )
                    context.set_default_timeout(DEADLINE)
                    page = context.new_page()
                    page.goto(url + path)
                    page.locator("progress[value]").first.wait_for()
                    # The place of the store on this machine is nobody's business.
                    page.evaluate(
                        "document.querySelector('.store').textContent = 's3://checkpoints/team'"
                    )
                    page.screenshot(path=str(folder / f"{name}-{scheme}.png"))
                    context.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
