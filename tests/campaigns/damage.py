"""Damage every vector in every way, and see that each damage is refused, does no harm, or is known
to be one that nothing covers.

    python -m tests.campaigns.damage --flips 40 --seed 1 [--only VECTOR]

One file at a time is deleted, cut, made longer, given a flipped bit, or swapped with another
rank's.  A merge that succeeds with other tensors than the undamaged one's is SILENT, unless
`UNCOVERED` names those bytes with the reason.  ``docs/formats.md`` names the same; the manifest of
a store covers all.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import re
import shutil
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise, repeat
from pathlib import Path

from ckptsync.cli.main import main as ckptsync
from ckptsync.errors import CkptsyncError
from ckptsync.layouts import registry
from ckptsync.merger.engine import MergeResult
from ckptsync.merger.plan import DType, MergeOptions
from ckptsync.stores.checkpoint_files import DirectoryFiles, Overlay
from tests.campaigns.campaign import arguments, working
from tests.support.files_in_memory import contents
from tests.support.merge_on_disk import merge_local
from tests.support.vector import Vector, vectors

ENDS = 4096  # bytes at both ends of a file, where headers and directories are
LOOKS = 8  # one damage in so many is shown to inspect and verify too
REFUSALS = (3, 5, 10)
SHOWN = 40
SLOW = 5.0  # seconds of CPU that no answer about a vector may take
_BEGIN = 1_700_000_000  # when the save was


@dataclass(frozen=True, slots=True)
class Damage:
    """``content`` is what each file has instead; ``None``: it is gone."""

    kind: str
    file: str
    where: str
    content: Mapping[str, bytes | None]

    def __str__(self) -> str:
        return f"{self.kind} {self.file} {self.where}".rstrip()


@dataclass(frozen=True, slots=True)
class Way:
    """One way to merge a vector, and what comes of it undamaged."""

    options: MergeOptions
    reference: MergeResult

    def __str__(self) -> str:
        source = self.options.source
        return f"--dtype {self.options.dtype}" + (f" --source {source}" if source else "")


class Patient:
    """A copy of a vector's files with the times that a save would give them."""

    def __init__(self, of: Vector, home: Path) -> None:
        self.home = home
        folder = of.keep.parent.parent
        self.sources = tuple(home / source.relative_to(folder) for source in of.sources)
        for source, here in zip(of.sources, self.sources, strict=True):
            shutil.copytree(source, here)
        self.files = contents(home)
        for name in self.files:
            self._date(name)
        self.ways = tuple(self._ways())

    @contextlib.contextmanager
    def damaged(self, by: Damage) -> Iterator[None]:
        """With the damage done, and undone at the end."""
        try:
            for name, content in by.content.items():
                if content is None:
                    (self.home / name).unlink()
                else:
                    (self.home / name).write_bytes(content)
                    self._date(name)
            yield
        finally:
            for name in by.content:
                (self.home / name).write_bytes(self.files[name])
                self._date(name)

    def merge(self, way: Way) -> tuple[str, str]:
        """Return what comes of it, against the undamaged, and what was said.

        That is ``refused``, ``harmless``, ``beside`` (only files beside the weights differ),
        ``SILENT``, ``TRACEBACK`` or ``SLOW``.
        """
        begun = time.process_time()
        try:
            merged = merge_local(self.sources, self.home / "merged", way.options)
        except CkptsyncError as e:
            word = "refused" if e.exit_code in REFUSALS else "TRACEBACK"
            report = f"{type(e).__name__}: {e}"
        except Exception:  # noqa: BLE001 - what is no CkptsyncError is what this looks for
            word, report = "TRACEBACK", traceback.format_exc()
        else:
            word, report = _compared(merged, way.reference)
        finally:
            shutil.rmtree(self.home / "merged", ignore_errors=True)
        return ("SLOW" if time.process_time() - begun > SLOW else word), report

    def look(self) -> tuple[str, str]:
        """Return whether inspect and verify say something."""
        for command in (["inspect"], ["verify", "--level", "parse"]):
            output = io.StringIO()
            try:
                with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                    code = ckptsync([*command, *map(str, self.sources)])
            except BaseException:  # noqa: BLE001 - as above
                return "TRACEBACK", f"{' '.join(command)}\n{traceback.format_exc()}"
            if code not in (0, *REFUSALS):
                return "TRACEBACK", f"{' '.join(command)}: exit code {code}: {output.getvalue()}"
        return "looked", ""

    def _date(self, name: str) -> None:
        """Shards first, then what is written when they are there."""
        last = name.rpartition("/")[2]
        is_metadata = last.endswith(".metadata") or last == "latest"
        at = _BEGIN + (2 if last == "trainer_state.json" else int(is_metadata))
        os.utime(self.home / name, (at, at))

    def _ways(self) -> Iterator[Way]:
        """Unasked first, which may choose another source when one is damaged; then every source.

        A source that is refused undamaged (an optimizer, a placeholder) is none.
        """
        files = Overlay([DirectoryFiles(str(source)) for source in self.sources])
        dtypes: tuple[DType, ...] = ("keep", "auto")
        every = [MergeOptions(d, source=str(s)) for s in registry.sources(files) for d in dtypes]
        for options in (MergeOptions("auto"), *every):
            with contextlib.suppress(CkptsyncError):
                yield Way(options, merge_local(self.sources, self.home / "merged", options))
            shutil.rmtree(self.home / "merged", ignore_errors=True)


def _compared(merged: MergeResult, reference: MergeResult) -> tuple[str, str]:
    ours, theirs = (
        {(t.name, t.dtype, t.shape, t.digest) for t in result.tensors}
        for result in (merged, reference)
    )
    if ours != theirs:
        return "SILENT", f"{sorted({name for name, *_ in ours ^ theirs})[:4]}, {merged.notes}"
    weights = (".safetensors", ".safetensors.index.json")
    beside = {f.path for f in {*merged.files} ^ {*reference.files} if not f.path.endswith(weights)}
    return ("beside", ", ".join(sorted(beside))) if beside else ("harmless", "")


def damages(files: Mapping[str, bytes], flips: int, dice: random.Random) -> Iterator[Damage]:
    """Yield every damage; ``flips`` bits in each file, and as many at its ends."""
    for name, data in files.items():
        yield Damage("delete", name, "", {name: None})
        for size in sorted({0, len(data) // 2, len(data) - 1} - {-1, len(data)}):
            yield Damage("cut", name, f"to {size} of {len(data)} bytes", {name: data[:size]})
        for more in (b"\0", dice.randbytes(100), data[:4096]):
            yield Damage("grow", name, f"by {len(more)} bytes", {name: data + more})
        near = sorted({*range(min(ENDS, len(data))), *range(max(0, len(data) - ENDS), len(data))})
        drawn = {*dice.sample(near, min(flips, len(near)))}
        drawn |= {*dice.sample(range(len(data)), min(flips, len(data)))}
        for at in sorted(drawn):
            bit = dice.randrange(8)
            changed = data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
            yield Damage("flip", name, f"byte {at} bit {bit}", {name: changed})
    alike: defaultdict[str, list[str]] = defaultdict(list)
    for name in sorted(files):
        alike[re.sub(r"\d+", "#", name)].append(name)
    for a, b in (pair for names in alike.values() for pair in pairwise(names)):
        if files[a] != files[b]:
            yield Damage("swap", a, f"with {b}", {a: files[b], b: files[a]})


UNCOVERED = (
    (".*", r".*(\.json|\.jinja|\.model|\.txt|\.py)", "beside", "configuration is copied as it is"),
    ("flip", r".*\.safetensors", "SILENT", "safetensors has no checksum"),
    ("swap", r".*\.distcp", "SILENT", "the shards of two ranks do not say whose they are"),
    ("swap", r".*layer_\d+.*-model_states\.pt", "SILENT", "layers do not say which they are"),
)
"""Kind of damage, file, outcome, and why it cannot be told on a bare directory."""


def reason(damage: Damage, word: str, files: Mapping[str, bytes]) -> str:
    """Return why this could not be seen; empty if it should have been."""
    for kind, file, outcome, why in UNCOVERED:
        if word == outcome and re.fullmatch(kind, damage.kind) and re.fullmatch(file, damage.file):
            return why
    if word == "SILENT" and damage.kind == "swap" and damage.file.endswith("_states.pt"):
        ranks = {re.sub(r".*mp_rank_(\d+)_.*", r"\1", name) for name in damage.content}
        if len(ranks) > 1:
            return "the files of tensor-parallel ranks do not say whose they are"
        if f"{damage.file.rpartition('/')[0]}/mp_rank_00_model_states.pt" not in files:
            return "at stage 3 the files of two ranks do not say whose they are"
    is_legacy = files[damage.file][:2] == b"\x80\x02" and damage.kind == "flip"
    return "torch's legacy container has no checksum" if is_legacy else ""


def campaign(of: Vector, flips: int, seed: int) -> tuple[str, Counter[str], Sequence[str]]:
    """Do every damage to one vector; return its name, the outcomes, and what was found."""
    dice, counts, findings = random.Random(f"{seed} {of.name}"), Counter[str](), list[str]()
    with working("damage", in_memory=True) as home:
        patient = Patient(of, home)
        if not patient.ways:
            findings.append(f"{of.name}: cannot be merged undamaged")
        for damage in damages(patient.files, flips, dice):
            with patient.damaged(damage):
                # the unasked way, and one of the others
                ways = {0, dice.randrange(len(patient.ways))} if patient.ways else set()
                outcomes = [(str(patient.ways[n]), *patient.merge(patient.ways[n])) for n in ways]
                if dice.randrange(LOOKS) == 0:
                    outcomes.append(("looked at", *patient.look()))
            for how, word, report in outcomes:
                why = reason(damage, word, patient.files) if word in ("SILENT", "beside") else ""
                counts[why or word] += 1
                if not why and word not in ("refused", "harmless", "looked"):
                    findings.append(f"{word} {of.name}: {damage}, {how}: {report}")
    return of.name, counts, findings


def main(argv: Sequence[str] | None = None) -> int:
    """0 if nothing was silent but what is known to be, 1 if something was."""
    parser = arguments(__doc__, "seed")
    parser.add_argument("--flips", type=int, default=40, help="bits to flip in each file")
    parser.add_argument("--only", default="", help="vectors whose name has this in it")
    args = parser.parse_args(argv)
    begun, total, every = time.monotonic(), Counter[str](), list[str]()
    chosen = [vector for vector in vectors() if args.only in vector.name]
    with ProcessPoolExecutor(2) as pool:
        results = pool.map(campaign, chosen, repeat(args.flips), repeat(args.seed))
        for name, counts, findings in results:
            print(f"{name}: {_listed(counts)}", flush=True)
            total += counts
            every += findings
    print(f"{_listed(total)} in {time.monotonic() - begun:.0f} s, seed {args.seed}")
    print("".join(f"FOUND {line}\n" for line in every[:SHOWN]), end="")
    print(f"{len(every)} findings, the first {SHOWN} shown")
    return 1 if every else 0


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {word}" for word, count in counts.most_common())


if __name__ == "__main__":
    sys.exit(main())
