"""Servers of the page: the command over a real store, or one in this process over values."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

from ckptsync.status.overview import Overview
from ckptsync.stores.memory import MemoryStore
from ckptsync.web.app import Guard, Page, make_app
from ckptsync.web.documents import Documents
from ckptsync.web.overview_cache import OverviewCache
from ckptsync.web.server import HttpServer

ANY = "127.0.0.1:0"


@contextlib.contextmanager
def web_command(store: Path, listen: str = ANY) -> Iterator[str]:
    """Run `ckptsync web` over a store until the block ends; the page's URL without a slash."""
    words = ["web", "--store", str(store), "--listen", listen, "--json"]
    command = [sys.executable, "-m", "ckptsync", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout
            yield json.loads(process.stdout.readline())["url"].rstrip("/")
        finally:
            process.kill()


@contextlib.contextmanager
def page_of(read: Callable[[], Overview]) -> Iterator[str]:
    """Serve the page of overviews that nobody has to store."""
    page = Page(OverviewCache(read), Documents(MemoryStore()), Guard(ANY, ""))
    with closing(HttpServer(ANY, make_app({}, page), "--listen")) as server:
        yield f"http://127.0.0.1:{server.port}"
