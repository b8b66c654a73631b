"""Print a page of the reference: `python -m tests.support.reference_pages commands`.

`commands`, `json` and `metrics` are docs/NAME.md, made from the parsers, from docs/json-schema.json
and from the metrics of a head.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import parser as prometheus

from ckptsync.cli.commands import EXIT_CODES, GROUPS
from ckptsync.cli.main import parser
from ckptsync.status import metrics
from tests.status.test_metrics import WELL, seen
from tests.support.stand_in_programs import ROOT

SCHEMA = json.loads((ROOT / "docs/json-schema.json").read_text("utf-8"))
COMMANDS = """# Commands

Every command, with its arguments, options and examples. [cli.md](cli.md) says what they have in
common: the store's name, `--json`, exit codes. This page is made from the program.
"""
JSON = """# JSON

What commands print with `--json` ([cli.md](cli.md#--json)), by command. Each document also has
`format` and `exit_code`. Sizes are bytes, durations seconds, times seconds since the epoch on the
store's clock. Keys may be added while `format` is 1; none go. The schema is
[json-schema.json](json-schema.json); this page is made from it.

`[]` marks a list, `{}` an object whose keys are names; `web-…` are answers of
[the page](web.md).
"""
METRICS = """# Metrics

`/metrics` of every process with `metrics.listen` ([monitoring.md](monitoring.md#metrics)) has the
first table, a head or verifier also the second, of the whole store at its last overview. Every
process also has `process_*` (memory, CPU, open files). This page is made from the program.
"""


def commands_page() -> str:
    """Return the page of all commands, in the order of `ckptsync --help`."""
    lines = [COMMANDS]
    for purpose, commands in GROUPS.items():
        lines += [f"## {purpose[0].upper()}{purpose[1:]}\n"]
        for name in commands:
            lines += _command(parser(name), "###")
            notes = getattr(sys.modules[f"ckptsync.cli.{name}"], "NOTES", "").split("\n\n")
            lines += [*(f"- {' '.join(note.split())}" for note in notes if note), ""]
    return "\n".join([*lines, f"## Exit codes\n\n```\n{EXIT_CODES}```\n"])


def _command(command: argparse.ArgumentParser, mark: str) -> Iterator[str]:
    """Yield the lines of a command, then those of its actions."""
    yield f"{mark} `{command.prog}`\n"
    if command.description:
        yield f"{_cell(command.description)}\n"
    actions = [a for a in command._actions if a.dest not in ("help", "json")]
    groups = [a for a in actions if isinstance(a, argparse._SubParsersAction)]
    rows = [_argument(command, a) for a in actions if a not in groups and a.help != "==SUPPRESS=="]
    yield from ["| argument | |\n|---|---|", *rows, ""] if rows else []
    if command.epilog:
        examples = command.epilog.rpartition("examples:\n")[2].replace("  ckptsync", "ckptsync")
        yield f"```\n{examples}\n```\n"
    for group in groups:
        for action in group.choices.values():
            yield from _command(action, f"{mark}#")


def _argument(command: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Return the row of an argument or option."""
    formatter = command._get_formatter()
    name = action.metavar or action.dest.upper()
    if action.choices and not action.metavar:
        name = ", ".join(map(str, action.choices))
    if action.nargs in ("*", "+"):
        name = f"{name}…"
    if action.option_strings:
        value = "" if action.nargs == 0 else f" {name}"
        name = ", ".join(action.option_strings) + value
    text = formatter._expand_help(action) if action.help else ""
    return f"| `{_cell(str(name).replace(' | ', ' or '))}` | {_cell(text)} |"


def json_page() -> str:
    """Return the page of all documents, by command."""
    lines = [JSON]
    for name, entry in SCHEMA["$defs"].items():
        if name not in ("document", "bytes"):
            about = entry.get("description", "")
            lines += [f"## {name}\n", *([f"{about[0].upper()}{about[1:]}.\n"] if about else [])]
            rows = [f"| `{key}` | {kind} | {text} |" for key, kind, text in json_keys(SCHEMA, name)]
            lines += ["| key | type | |\n|---|---|---|", *rows, ""] if rows else []
    return "\n".join(lines)


def json_keys(schema: dict[str, Any], name: str) -> list[tuple[str, str, str]]:
    """Return path, type and text of each key of a definition, the types of others by their name."""
    return list(_keys(schema["$defs"][name]))


def _keys(node: dict[str, Any], above: str = "") -> Iterator[tuple[str, str, str]]:
    for part in (*node.get("allOf", ()), *node.get("oneOf", ())):
        yield from _keys(part, above)
    for key, inner in node.get("properties", {}).items():
        path = f"{above}{key}"
        yield path, _cell(_type(inner)), _cell(inner.get("description", ""))
        yield from _keys(_inside(inner), f"{path}.")


def _inside(node: dict[str, Any]) -> dict[str, Any]:
    """Return what a list, a mapping or a value that may be null contains, else the value."""
    values = node.get("additionalProperties")
    inner = node.get("items") or (values if isinstance(values, dict) else None)
    inner = inner or next(iter(node.get("anyOf", ())), None)
    return _inside(inner) if inner else node


def _type(node: dict[str, Any]) -> str:
    """Return the type of a value in a few words."""
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        return name if name == "bytes" else f"[{name}](#{name})"
    if "enum" in node:
        return " ".join(f"`{value}`" for value in node["enum"])
    if "const" in node:
        return f"`{node['const']}`"
    if "anyOf" in node:
        return " or ".join(dict.fromkeys(map(_type, node["anyOf"])))
    if "allOf" in node:
        return " and ".join(map(_type, node["allOf"]))
    kind = node.get("type", "any")
    if isinstance(kind, list):
        return " or ".join(kind)
    if kind == "array":
        return f"{_type(node.get('items', {}))} []"
    if kind == "object" and isinstance(node.get("additionalProperties"), dict):
        return f"{_type(node['additionalProperties'])} {{}}"
    return str(kind)


def metrics_page() -> str:
    """Return the page of the metrics of a process, and of a head."""
    own, store = (_metrics(overview) for overview in (None, seen()))
    head = "| metric and labels | |\n|---|---|"
    of_store = [row for row in store if row not in own]
    most = metrics.MOST
    limits = f"No label names a checkpoint. The newest {most} runs and {most} nodes are exported."
    return "\n".join(
        [METRICS, head, *own, "", "## Of a head or verifier\n", limits, "", head, *of_store, ""]
    )


def _metrics(overview: Any) -> list[str]:
    """Return a row for each metric."""
    text = metrics.exposition(WELL, overview).decode()
    families = list(prometheus.text_string_to_metric_families(text))
    return [
        f"| `{family.samples[0].name}{_labels(family.samples[0].labels)}` |"
        f" {family.documentation} |"
        for family in families
        if family.name.startswith("ckptsync_")
    ]


def _labels(labels: Mapping[str, str]) -> str:
    return f"{{{','.join(labels)}}}" if labels else ""


def _cell(text: str) -> str:
    """Return a text as Markdown within a table."""
    return " ".join(text.split()).replace("|", "\\|")


PAGES: Mapping[str, Callable[[], str]] = {
    "commands": commands_page,
    "json": json_page,
    "metrics": metrics_page,
}

if __name__ == "__main__":
    print(PAGES[sys.argv[1]](), end="")
