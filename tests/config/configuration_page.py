"""Print docs/configuration.md: `python -m tests.config.configuration_page`."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator

from ckptsync.config.schema import KEYS, SECTIONS

HEAD = """# Configuration

A service reads one YAML file: `ckptsync run -c FILE`. `ckptsync init` writes one, and `ckptsync
config show FILE` prints the value of each key and its source. This page is made from the program.

Durations: `10s`, `5m`, `2h`, `7d`, `1h30m`. Sizes: `5GB` (powers of 1000), `512MiB` (powers of
1024). Rates: `50MB/s`. An environment variable overrides the file, with a warning.

Some values need an extra (`pip install '.[s3]'` in ckptsync's directory): `s3` for `s3://`,
`fsspec` for other schemes, `alerts` for `alerts.urls`, `ray` for `head.engine: ray`. An SSH host
must be in `known_hosts`.
"""


def page() -> str:
    """Return the page: a table for each section, in the order of the schema."""
    return "\n".join([HEAD, *_tables()])


def _tables() -> Iterator[str]:
    for section in ["", *SECTIONS]:
        names = [key for key in KEYS if key.rpartition(".")[0] == section]
        about = (inspect.getdoc(SECTIONS[section]) or "").split("\n\n") if section else []
        yield f"## {section or 'Top of the file'}\n"
        if about:
            told = " ".join(" ".join(about).split()).partition(": see ")[0]
            yield f"{told.rstrip('.')}.\n"
        yield "| key | default | variable | |\n|---|---|---|---|"
        for name in names:
            key = KEYS[name]
            default = key.default if isinstance(key.default, str) else json.dumps(key.default)
            shown = f"`{default}`" if default else ""
            variable = f"`{key.variable}`" if key.variable else ""
            text = key.text.replace("|", "\\|")
            yield f"| `{name.rpartition('.')[2]}` | {shown} | {variable} | {text} |"
        yield ""


if __name__ == "__main__":
    print(page(), end="")
