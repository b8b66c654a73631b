"""The page as one HTML file, for a mail or a login node without a server.

Modules, styles and the documents of all runs are inlined: modules as ``data:`` URLs with an import
map, documents as JSON that the page finds instead of asking a server.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from ckptsync.status.overview import Overview
from ckptsync.web.app import FORMAT, static_files
from ckptsync.web.documents import Documents

MOST = 20_000  # checkpoints in a file, of all runs together, as far as each has more than `LEAST`
LEAST = 60  # newest checkpoints of a run
_UNESCAPED = "!'()*~"  # by encodeURIComponent, beside what `quote` leaves
_IMPORT = re.compile(r'((?:from|import)\s*)"\./([\w./-]+\.js)"')
_POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline' data:"
)


def html_file(overview: Overview, documents: Documents) -> bytes:
    """Return the overview and the runs of a store as an HTML file that loads nothing.

    Of each run it has the newest `LEAST` checkpoints or more. Curves may be read from the store.
    """
    most = max(LEAST, MOST // max(1, len(overview.runs)))
    pages = {"/": documents.overview(overview), "/nodes": documents.nodes(overview)}
    for run in overview.runs:
        pages[f"/runs/{quote(run.run, safe=_UNESCAPED)}"] = documents.run(overview, run.run, most)
    return _inlined(
        {url: {"format": FORMAT, "exit_code": 0, **document} for url, document in pages.items()}
    )


def _inlined(documents: Mapping[str, Any]) -> bytes:
    """Return the page's HTML with everything that it loads, and these documents by URL.

    Relative imports do not work in a module that is a ``data:`` URL; they become names, which an
    import map maps to the modules.
    """
    texts = {name: body.decode() for name, body in static_files().items()}
    modules = {
        f"ckptsync/{name}": _data_url("text/javascript", _IMPORT.sub(r'\1"ckptsync/\2"', text))
        for name, text in texts.items()
        if name.endswith(".js")
    }
    data = _script("application/json", json.dumps(documents), ' id="data"')
    scripts = [
        data,
        _script("importmap", json.dumps({"imports": modules})),
        _script("module", 'import "ckptsync/app.js";'),
    ]
    policy = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    page = texts["index.html"]
    replacements = {
        r"<head>": f"<head>\n{policy}",
        r'<link rel="icon"[^>]*>': _icon(texts.get("icon.svg", "")),
        r'<link rel="stylesheet"[^>]*>': f"<style>\n{texts.get('style.css', '')}</style>",
        r'<script type="module"[^>]*></script>': "\n".join(scripts),
    }
    for pattern, text in replacements.items():
        page = re.sub(pattern, lambda _, text=text: text, page, count=1)  # type: ignore[misc]
    return page.encode()


def _script(kind: str, text: str, more: str = "") -> str:
    """Return a script element that its text cannot end; ``more``: further attributes."""
    escaped = text.replace("<", "\\u003c")
    return f'<script type="{kind}"{more}>{escaped}</script>'


def _icon(svg: str) -> str:
    """Return the link element of an icon; empty without one."""
    return f'<link rel="icon" href="{_data_url("image/svg+xml", svg)}">' if svg else ""


def _data_url(kind: str, text: str) -> str:
    """Return a text as a ``data:`` URL of a content type."""
    return f"data:{kind};base64,{base64.b64encode(text.encode()).decode()}"
