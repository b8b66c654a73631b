"""Who may import whom: the table of rooms, and a checker that reads a module's source without running it."""

from __future__ import annotations

import ast
import fnmatch
from collections.abc import Iterator, Mapping

# From the bottom up.  A module may import from rooms below its own, and within its own room; rooms of one line do not know each other.
FLOORS: tuple[frozenset[str], ...] = (
    frozenset({"base"}),
    frozenset({"formats"}),
    frozenset({"layouts"}),
    frozenset({"records"}),
    frozenset({"walk", "mounts", "child"}),
    frozenset({"stores", "spool", "scan", "watch"}),
    frozenset({"merge", "catalogue"}),
    frozenset({"worker", "head", "verify", "fleet", "pull"}),
    frozenset({"config"}),
    frozenset({"web", "doctor"}),
    frozenset({"service", "hooks"}),
    frozenset({"cli"}),
    frozenset({"__main__"}),
)
BASE = frozenset(
    {"", "collector", "crc", "decoding", "digest", "errors", "model", "parsing", "paths", "units"}
)  # one room without a folder; "" is ckptsync itself, its version
DOORS: Mapping[str, tuple[str, ...]] = {
    "": ("ckptsync.hooks.mark_saved",)
}  # what the package offers at its top, imported when it is called
FLOOR = {room: n for n, rooms in enumerate(FLOORS) for room in rooms}

# What is named in one place only, so that it can be replaced, or need not be installed.
CONFINED: Mapping[str, tuple[str, ...]] = {
    "torch": ("hooks.*", "verify.child", "verify.inert", "verify.model_child"),
    "safetensors": ("hooks.*", "verify.child"),
    "transformers": ("hooks.*", "verify.model_child"),
    "accelerate": ("hooks.*", "verify.model_child"),
    "deepspeed": (),
    "llamafactory": ("hooks.llamafactory",),
    "ray": ("hooks.*", "merge.ray"),
    "fsspec": ("stores.*",),
    "s3fs": ("stores.*",),
    "botocore": ("stores.*",),
    "aiobotocore": ("stores.*",),
    "boto3": ("stores.*",),
    "asyncssh": ("stores.*",),
    "paramiko": ("stores.*",),
    "apscheduler": ("service.*",),
    "watchdog": ("watch",),
    "isal": ("digest",),
    "rich": ("cli.*",),
    "prometheus_client": ("web.metrics",),
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

# Modules that decide: the same answer for the same arguments, for ever.  A store, or files, may be among the arguments.
PURE = (
    *sorted(BASE - {""}),
    "formats.*",
    "layouts.*",
    "records.*",
    "merge.*",
    "config.*",
    "fleet.*",
    *(f"catalogue.{m}" for m in ("fresh", "lost", "shortened", "summary", "units")),
    *(f"worker.{m}" for m in ("plan", "result", "saving", "selecting", "settle", "torn_saves")),
    *(f"head.{m}" for m in ("checked", "deciding", "errands", "marking", "retaining")),
    *(f"verify.{m}" for m in ("bits", "due", "expected", "findings", "naming", "ranges", "structure", "reporting")),
    *(f"verify.{m}" for m in ("archives", "baseline", "checksums", "sampling", "units", "waiting")),
    *(f"pull.{m}" for m in ("choose", "plan")),
    *(f"doctor.{m}" for m in ("checks", "facts", "launch")),
    "web.metrics",
    "cli.status_view",
    "cli.units",
)
NOT_PURE: Mapping[str, str] = {
    "formats.zstd_items": "several threads read one stream: a lock keeps its decompressor",
    "merge.local": "publishes into a directory",
    "merge.looking": "opens the locations that an operator named",
    "merge.remote": "gathers what is far away with threads",
    "merge.ray": "hands files out to a cluster",
    "merge.reaching": "opens, on another machine, what an operator named",
    "merge.pipeline": "has the merge's threads and locks, so that no other module of it need know of any",
    "config.loading": "reads the file and the environment, and makes the one pace of all transfers of a process",
    "config.runs": "finds the output directories there are",
}
IMPURE = frozenset(
    "asyncio ctypes fcntl ftplib getpass glob http io locale logging mmap multiprocessing os pathlib platform pwd queue random resource".split(  # noqa: SIM905
    )
    + "secrets select shutil signal socket ssl subprocess sys tempfile termios threading time urllib uuid weakref _thread concurrent".split()  # noqa: SIM905
)
IMPURE_OURS = frozenset(
    f"ckptsync.{m}"
    for m in (
        *("stores.beneath", "mounts", "stores.opening", "stores.writing", "watch"),
        *("stores.posix.store", "stores.posix.publish", "stores.posix.draft"),
        *(
            "stores.sftp.store",
            "stores.sftp.files",
            "stores.sftp.connection",
            "stores.sftp.protocol",
            "stores.sftp.upload",
        ),
        *("stores.trees", "stores.pieces"),
        *(
            "stores.s3.store",
            "stores.s3.bucket",
            "stores.s3.client",
            "stores.s3.multipart",
            "stores.s3.transport",
            "stores.s3.upload",
        ),
        *("stores.stream", "stores.generic.store", "stores.retry"),
    )
)
IMPURE_CALLS = frozenset({"open", "print", "input", "breakpoint"})
CLOCKS = frozenset({"now", "utcnow", "today", "default_rng"})  # datetime's and numpy's ways to an answer that changes


def room_of(module: str) -> str:
    """The room of a module's dotted name without ``ckptsync.``."""
    first = module.partition(".")[0]
    return "base" if first in BASE else first


def imports(source: str) -> Iterator[str]:
    """Every dotted name that is imported anywhere in the source; ``from a import b`` names ``a`` and ``a.b``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = "." * node.level + (node.module or "")
            yield origin
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def problems(module: str, source: str) -> list[str]:
    """What a module does that its location does not allow; ``module`` is its dotted name without ``ckptsync.``."""
    found = [*_misplaced(module, source), *_strangers(module, source), *_dangers(module, source)]
    if is_pure(module):
        found += _impurities(source)
    return found


def is_pure(module: str) -> bool:
    """Whether the tables say that a module decides and does nothing."""
    return _matches(module, PURE) and module not in NOT_PURE


def cycles(graph: Mapping[str, frozenset[str]]) -> list[tuple[str, ...]]:
    """Modules that import each other, directly or through others: sets of names, each as a sorted tuple."""
    reach = {module: _reachable(module, graph) for module in graph}
    rings = {tuple(sorted(other for other in reach[module] if module in reach.get(other, ()))) for module in graph}
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
    own = room_of(module)
    if own not in FLOOR:
        yield f"{own}: a room that is not in the table of tests/layers.py"
        return
    for name in imports(source):
        if name.startswith("."):
            yield f"{name}: a relative import, write ckptsync.…"
        if name.partition(".")[0] != "ckptsync" or name.startswith(DOORS.get(module, ())):
            continue
        other = room_of(name.removeprefix("ckptsync").removeprefix("."))
        if other not in FLOOR:
            if not name.startswith("ckptsync.__"):  # such as its version, out of ckptsync/__init__.py
                yield f"{name}: in a room that is not in the table of tests/layers.py"
        elif FLOOR[other] > FLOOR[own]:
            yield f"{name}: {own} imports upwards"
        elif FLOOR[other] == FLOOR[own] and other != own:
            yield f"{name}: {own} and {other} are siblings"


def _strangers(module: str, source: str) -> Iterator[str]:
    for name in imports(source):
        top = name.partition(".")[0]
        if top in CONFINED and not name.startswith(("importlib.metadata", "importlib.resources")):
            if top == "importlib" and name == "importlib" and not _names_importlib_itself(source):
                continue  # from importlib import metadata
            if not _matches(module, CONFINED[top]):
                where = " and ".join(CONFINED[top]) or "nowhere"
                yield f"{name}: belongs to {where}"


def _names_importlib_itself(source: str) -> bool:
    return any(isinstance(n, ast.Import) and any(a.name == "importlib" for a in n.names) for n in ast.walk(ast.parse(source)))


def _dangers(module: str, source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        given = {k.arg: ast.unparse(k.value) for k in node.keywords}
        if called in FORBIDDEN_CALLS:
            yield f"{called}(): runs what it is given"
        if called.endswith("torch.load") and given.get("weights_only") != "True":
            yield "torch.load() without weights_only=True: runs what a file contains"
        if given.get("allow_pickle", "False") != "False":
            yield f"{called}(allow_pickle): runs what a file contains"
        if called in ("yaml.load", "yaml.unsafe_load", "yaml.full_load") and "Safe" not in given.get("Loader", ""):
            yield f"{called}(): builds what a file names"


def _impurities(source: str) -> Iterator[str]:
    for name in imports(source):
        if name in IMPURE_OURS or (name.partition(".")[0] in IMPURE and not name.startswith("urllib.parse")):
            yield f"{name}: not in a pure module"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in IMPURE_CALLS or called.rpartition(".")[2] in CLOCKS:
                yield f"{called}(): not in a pure module"
