"""Who may import whom: the table of packages, and a checker that reads a module's source without
running it.
"""

from __future__ import annotations

import ast
import fnmatch
from collections.abc import Iterator, Mapping
from functools import cache

# From the bottom up. A module may import from packages below its own, and within its own package;
# packages of one line do not import each other.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"base"}),
    frozenset({"formats"}),
    frozenset({"layouts"}),
    frozenset({"safe_open", "mounts", "child"}),
    frozenset({"walk"}),
    frozenset({"stores", "spool", "checkpoint_dirs"}),
    frozenset({"records"}),
    frozenset({"merge", "catalogue"}),
    frozenset({"worker", "head", "verify", "status", "pull"}),
    frozenset({"config"}),
    frozenset({"doctor"}),
    frozenset({"service", "hooks"}),
    frozenset({"cli"}),
    frozenset({"__main__"}),
)
# One package without a folder; "" is ckptsync itself, its version.
BASE = frozenset(
    {
        "",
        "typed_json",
        "digest",
        "errors",
        "python_gc",
        "tensors",
        "plain_json",
        "safe_names",
        "quantities",
    }
)
# What ckptsync offers at its top, imported when it is called.
LAZY: Mapping[str, tuple[str, ...]] = {"": ("ckptsync.hooks.mark_saved",)}
LAYER = {package: n for n, packages in enumerate(LAYERS) for package in packages}

# What is named in one place only, so that it can be replaced, or need not be installed.
ONLY_IN: Mapping[str, tuple[str, ...]] = {
    "torch": ("hooks.*", "verify.load_child", "verify.model_child"),
    "safetensors": ("hooks.*", "verify.load_child"),
    "transformers": ("hooks.*", "verify.model_child"),
    "accelerate": ("hooks.*", "verify.model_child"),
    "deepspeed": (),
    "ray": ("hooks.*", "merge.ray"),
    "fsspec": ("stores.*",),
    "s3fs": ("stores.*",),
    "botocore": ("stores.*",),
    "aiobotocore": ("stores.*",),
    "boto3": ("stores.*",),
    "asyncssh": ("stores.*",),
    "paramiko": ("stores.*",),
    "apscheduler": ("service.*",),
    "watchdog": ("service.watch",),
    "isal": ("digest",),
    "rich": ("cli.*",),
    "prometheus_client": ("status.metrics",),
    "zstandard": ("formats.zstd_items",),
    "compression": ("formats.zstd_items",),
    "yaml": ("config.*", "cli.*"),
    "importlib": ("cli.*",),  # an import that is computed cannot be read here
    # Whatever runs code that a file contains, or could be made to.
    "pickle": (),
    "_pickle": (),
    "marshal": (),
    "shelve": (),
    "dill": (),
    "cloudpickle": (),
    "joblib": (),
    "jsonpickle": (),
    "runpy": (),
    "code": (),
}
FORBIDDEN_CALLS = frozenset({"eval", "exec", "compile", "__import__"})

# Modules that decide: the same answer for the same arguments, for ever.  A store, or files, may be
# among the arguments.
PURE = (
    *sorted(BASE - {""}),
    "formats.*",
    "layouts.*",
    "records.*",
    "merge.*",
    "config.*",
    "status.*",
    *(f"catalogue.{m}" for m in ("location_summary", "uncached")),
    *(
        f"worker.{m}"
        for m in ("finished", "progress", "selection", "spool_room", "stored_files", "torn_saves")
    ),
    *(f"head.{m}" for m in ("retention", "rules", "schedule")),
    *(f"verify.{m}" for m in ("expected", "level_parse", "schedule", "write_reports")),
    *(f"pull.{m}" for m in ("choose", "plan")),
    *(f"doctor.{m}" for m in ("checks", "facts", "launch")),
    "cli.systemd_units",
)
NOT_PURE: Mapping[str, str] = {
    "status.http_server": "serves HTTP",
    "records.io": "reads several records at once: each costs a round trip",
    "formats.zstd_items": "several threads read one stream: a lock keeps its decompressor",
    "merge.destination": "publishes into a directory or a store",
    "merge.ray": "gives files to a cluster",
    "merge.inputs": "opens the locations that the user named",
    "merge.engine": "writes several files at once",
    "merge.container_crcs": "several threads read one record",
    "merge.weights": "makes several units of a file at once",
    "config.loading": (
        "reads the file and the environment, and makes the one pace of all transfers of a process"
    ),
    "config.output_dirs": "finds the output directories there are",
}
IMPURE = frozenset(
    [  # noqa: RUF005
        "asyncio",
        "ctypes",
        "fcntl",
        "ftplib",
        "getpass",
        "glob",
        "http",
        "io",
        "locale",
        "logging",
        "mmap",
        "multiprocessing",
        "os",
        "pathlib",
        "platform",
        "pwd",
        "queue",
        "random",
        "resource",
    ]
    + [
        "secrets",
        "select",
        "shutil",
        "signal",
        "socket",
        "ssl",
        "subprocess",
        "sys",
        "tempfile",
        "termios",
        "threading",
        "time",
        "urllib",
        "uuid",
        "weakref",
        "_thread",
        "concurrent",
    ]
)
IMPURE_OURS = frozenset(
    f"ckptsync.{m}"
    for m in (
        *("safe_open", "mounts", "stores.opening"),
        *("stores.posix.store", "stores.posix.publish", "stores.posix.part_file"),
        *(
            "stores.sftp.store",
            "stores.sftp.server_files",
            "stores.sftp.connection",
            "stores.sftp.protocol",
            "stores.sftp.part_file",
        ),
        *("stores.clock", "stores.open_files", "stores.prefetch"),
        *(
            "stores.s3.store",
            "stores.s3.requests",
            "stores.s3.client",
            "stores.s3.multipart",
            "stores.s3.transport",
            "stores.s3.conditional_write",
        ),
        *("stores.stream", "stores.fsspec.store", "stores.retry"),
    )
)
IMPURE_CALLS = frozenset({"open", "print", "input", "breakpoint"})
# datetime's and numpy's ways to an answer that changes
CLOCKS = frozenset({"now", "utcnow", "today", "default_rng"})


def package_of(module: str) -> str:
    """The package of a module's dotted name without ``ckptsync.``."""
    first = module.partition(".")[0]
    return "base" if first in BASE else first


@cache
def _nodes(source: str) -> tuple[ast.AST, ...]:
    """Return the imports and calls of a source; each of several questions is about these."""
    return tuple(
        n
        for n in ast.walk(ast.parse(source))
        if isinstance(n, (ast.Import, ast.ImportFrom, ast.Call))
    )


@cache
def _calls(source: str) -> tuple[tuple[str, ast.Call], ...]:
    """Return what a source calls, as it is written, and the calls."""
    return tuple(
        (ast.unparse(node.func), node) for node in _nodes(source) if isinstance(node, ast.Call)
    )


def imports(source: str) -> Iterator[str]:
    """Every dotted name that is imported anywhere in the source.

    ``from a import b`` names ``a`` and ``a.b``.
    """
    for node in _nodes(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = "." * node.level + (node.module or "")
            yield origin
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def problems(module: str, source: str) -> list[str]:
    """What a module does that its location does not allow.

    ``module`` is its dotted name without ``ckptsync.``.
    """
    found = [*_misplaced(module, source), *_strangers(module, source), *_dangers(module, source)]
    if is_pure(module):
        found += _impurities(source)
    return found


def is_pure(module: str) -> bool:
    """Whether the tables say that a module decides and does nothing."""
    return _matches(module, PURE) and module not in NOT_PURE


def cycles(graph: Mapping[str, frozenset[str]]) -> list[tuple[str, ...]]:
    """Modules that import each other, directly or through others: sets of names, each as a sorted
    tuple.
    """
    reach = {module: _reachable(module, graph) for module in graph}
    rings = {
        tuple(sorted(other for other in reach[module] if module in reach.get(other, ())))
        for module in graph
    }
    return sorted(ring for ring in rings if ring)


def _reachable(module: str, graph: Mapping[str, frozenset[str]]) -> frozenset[str]:
    seen: set[str] = set()
    to_do = list(graph[module])
    while to_do:
        at = to_do.pop()
        if at not in seen:
            seen.add(at)
            to_do += graph.get(at, ())
    return frozenset(seen)


def _matches(module: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(module, p) or module == p.removesuffix(".*") for p in patterns)


def _misplaced(module: str, source: str) -> Iterator[str]:
    own = package_of(module)
    if own not in LAYER:
        yield f"{own}: a package that is not in the table of tests/layers.py"
        return
    for name in imports(source):
        if name.startswith("."):
            yield f"{name}: a relative import, write ckptsync.…"
        if name.partition(".")[0] != "ckptsync" or name.startswith(LAZY.get(module, ())):
            continue
        other = package_of(name.removeprefix("ckptsync").removeprefix("."))
        if other not in LAYER:
            # such as its version, out of ckptsync/__init__.py
            if not name.startswith("ckptsync.__"):
                yield f"{name}: in a package that is not in the table of tests/layers.py"
        elif LAYER[other] > LAYER[own]:
            yield f"{name}: {own} imports upwards"
        elif LAYER[other] == LAYER[own] and other != own:
            yield f"{name}: {own} and {other} are siblings"


def _strangers(module: str, source: str) -> Iterator[str]:
    for name in imports(source):
        top = name.partition(".")[0]
        if top in ONLY_IN and not name.startswith(
            ("importlib.metadata", "importlib.resources", "importlib.util")
        ):
            if top == "importlib" and name == "importlib" and not _names_importlib_itself(source):
                continue  # from importlib import metadata
            if not _matches(module, ONLY_IN[top]):
                where = " and ".join(ONLY_IN[top]) or "nowhere"
                yield f"{name}: belongs to {where}"


def _names_importlib_itself(source: str) -> bool:
    return any(
        isinstance(n, ast.Import) and any(a.name == "importlib" for a in n.names)
        for n in _nodes(source)
    )


def _dangers(module: str, source: str) -> Iterator[str]:
    for called, node in _calls(source):
        given = {
            k.arg: ast.unparse(k.value)
            for k in node.keywords
            if k.arg in ("weights_only", "allow_pickle", "Loader")
        }
        if called in FORBIDDEN_CALLS:
            yield f"{called}(): runs what it is given"
        if called.endswith("torch.load") and given.get("weights_only") != "True":
            yield "torch.load() without weights_only=True: runs what a file contains"
        if given.get("allow_pickle", "False") != "False":
            yield f"{called}(allow_pickle): runs what a file contains"
        if called in (
            "yaml.load",
            "yaml.unsafe_load",
            "yaml.full_load",
        ) and "Safe" not in given.get("Loader", ""):
            yield f"{called}(): builds what a file names"


def _impurities(source: str) -> Iterator[str]:
    for name in imports(source):
        if name in IMPURE_OURS or (
            name.partition(".")[0] in IMPURE and not name.startswith("urllib.parse")
        ):
            yield f"{name}: not in a pure module"
    for called, _ in _calls(source):
        if called in IMPURE_CALLS or called.rpartition(".")[2] in CLOCKS:
            yield f"{called}(): not in a pure module"
