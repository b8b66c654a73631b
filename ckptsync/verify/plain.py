"""Verifying a checkpoint or a model in a plain directory, of which nothing was recorded, or a baseline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from ckptsync.errors import Corrupt, Incomplete, Unsupported
from ckptsync.layouts import table
from ckptsync.records.report import Finding, Level, Reading, Report
from ckptsync.stores.pieces import fetched
from ckptsync.stores.tree import Tree
from ckptsync.verify import structure
from ckptsync.verify.baseline import expected
from ckptsync.verify.checksums import checksums
from ckptsync.verify.contents import contents, narrowed
from ckptsync.verify.expected import Expected, stat
from ckptsync.verify.findings import verdict, worst_first
from ckptsync.verify.loads import Part, loads
from ckptsync.verify.modelling import climb, models
from ckptsync.verify.reading import Counted, Told, Watched, blocks_of
from ckptsync.verify.sampling import Sample, said
from ckptsync.verify.sweep import suspects
from ckptsync.verify.units import coverage, sampled

NO_DIGESTS = "nothing recorded what these bytes should be: no digest was compared, so damage to values would not be seen"
_THREADS = 4


def verify_path(
    files: Tree,
    level: Level,
    name: str = "",
    *,
    baseline: Sequence[Expected] | None = None,
    sample: Sample | None = None,
    told: Told = lambda _: None,
) -> Report:
    """What can be said of a directory: its own metadata against its files, the CRC32s that archives have; at level load every tensor.

    Without a ``baseline`` level digest is claimed of nothing, and the report says so; with one it is as in a store, and what is not there is damage.
    The report has no run, manifests or number; ``arriving`` means that its metadata demands files that are not there.

    Raises Unsupported if no layout knows it (and there is no baseline), Incomplete if it changed meanwhile, StoreError.
    """
    looking = _Looking(files, name, baseline, told)
    with closing(looking):
        looking.look(level, sample)
    if changed := files.changed():
        raise Incomplete(f"{changed[0]}: changed while it was verified", hint="verify again when nothing writes to it")
    found = worst_first(looking.found)
    unparsed = next((f.detail for f in found if f.detail.startswith(structure.UNPARSED)), None)
    lacking = looking.lacking if baseline is None else frozenset()
    is_arriving = bool(lacking) or any(f.detail.startswith(structure.LACKING) for f in found)
    judged = verdict((f for f in found if f not in lacking), is_arriving=is_arriving)
    if unparsed and judged == "ok" and baseline is None:
        raise Unsupported(unparsed)
    reached = structure.reached(level, found)
    if judged != "damaged" and (sample or (baseline is None and reached == "digest")):
        reached = "stat"
    return Report("", name, name, 0, reached, judged, (), "", looking.read, found, readings=tuple(looking.readings))


def record(files: Tree, told: Told = lambda _: None) -> tuple[Expected, ...]:
    """The digests of all files, for a baseline.  Raises Incomplete if it changed meanwhile, StoreError."""
    source = Counted(files, told)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="ckptsync-record") as pool:
        made = list(pool.map(lambda item: expected(item[0], blocks_of(source, *item)), files.sizes().items()))
    if changed := files.changed():
        raise Incomplete(f"{changed[0]}: changed while it was recorded", hint="record again when nothing writes to it")
    return tuple(made)


class _Looking:
    """What a directory is found to be, level by level."""

    def __init__(self, files: Tree, name: str, baseline: Sequence[Expected] | None, told: Told) -> None:
        self._files, self._name, self._baseline, self._told = files, name, baseline, told
        self._watched = Watched(fetched(files, files))
        self._source = Counted(files, told)
        self._compared = self._loaded = 0
        self.lacking: frozenset[Finding] = frozenset()
        self.found: list[Finding] = []
        self.readings: list[Reading] = []

    @property
    def read(self) -> int:
        """Bytes that were really read."""
        return self._watched.read + self._source.read + self._loaded

    def close(self) -> None:
        """Let go of what reads ahead."""
        self._watched.close()

    def look(self, level: Level, sample: Sample | None) -> None:
        """At all of it, level by level."""
        climb(level, (self._stat, lambda: self._digest(sample), self._parse, self._load, self._model))

    def _stat(self) -> None:
        self.found += [Finding("note", self._name, line) for line in self._files.passed_over()]
        lacking = list(_lacking(self._watched, must_be_known=self._baseline is None))
        self.lacking = frozenset(f for f in lacking if f.kind == "missing")
        self.found += lacking
        sizes = self._files.sizes()
        if self._baseline is None:
            self.found.append(Finding("note", self._name, NO_DIGESTS))
        else:
            self.found += stat(self._baseline, sizes)
            known = {f.path for f in self._baseline}
            self.found += [Finding("note", path, "the baseline does not name it") for path in sorted(sizes.keys() - known)]
        self.readings.append(Reading("stat", len(sizes), sum(sizes.values()), len(sizes), sum(sizes.values())))

    def _digest(self, sample: Sample | None) -> None:
        if self._baseline is None:
            found, reading = checksums(self._watched)
            self.found += found
            self.readings.append(reading)
            if reading.size:
                compared = f"the CRC32s of {reading.size} of {reading.of_size} bytes, in {reading.files} of {reading.of_files} files, were compared"
                self.found.append(Finding("note", self._name, compared))
            return
        there = [f for f in self._baseline if self._files.sizes().get(f.path) == f.size]
        total = len(self._baseline), sum(f.size for f in self._baseline)
        if sample is None:
            self.found += contents(self._source, there, self._watched)
            self.readings.append(Reading("digest", len(there), sum(f.size for f in there), *total))
            return
        chosen = sampled(there, sample.share, sample.seed)
        self.found += narrowed(self._source, there, suspects(self._source, chosen), self._watched)
        self.readings.append(Reading("digest", *coverage(chosen), *total))
        self.found.append(Finding("note", self._name, said(self.readings[-1])))

    def _parse(self) -> None:
        watched, sizes = self._watched, self._files.sizes()
        before, watched.tensors = watched.read, 0
        self.found += structure.checkpoint(watched, lambda path: path or self._name)
        self.readings.append(
            Reading("parse", len(watched.seen), watched.read - before, len(sizes), sum(sizes.values()), watched.tensors)
        )

    def _load(self) -> None:
        parts = [Part(path, path, size, path) for path, size in self._files.sizes().items()]
        results, reading = loads(self._files, parts, self._name, self._watched, self._told)
        self._loaded += reading.size
        self.found += results
        self.readings.append(reading)

    def _model(self) -> None:
        where: Mapping[str, tuple[str, int]] = {path: (path, size) for path, size in self._files.sizes().items()}
        results, reading = models(self._source, where, lambda path: path or self._name, self._told)
        self.found += results
        self.readings.append(reading)


def _lacking(files: Watched, *, must_be_known: bool) -> Iterator[Finding]:
    """What the metadata demands and is not there, or not with its size."""
    sources = _asked(files, must_be_known=must_be_known)
    if isinstance(sources, Finding):
        yield sources
        return
    for path, size in sources.items():
        here = files.sizes().get(path)
        if here is None:
            yield Finding("missing", path, "the checkpoint's own metadata demands it")
        elif size is not None and here != size:
            yield Finding("size", path, f"{here} bytes, {size} demanded by the checkpoint's own metadata")


def _asked(files: Watched, *, must_be_known: bool) -> dict[str, int | None] | Finding:
    try:
        sources = table.sources(files)
        demands = table.demands(files)
    except Corrupt as e:
        return Finding("parse", files.last, str(e))
    if not sources and must_be_known:
        raise table.no_weights(files)
    if not demands.model:
        return Finding("note", "", f"{structure.LACKING}nothing here says what a whole model is") if must_be_known else {}
    return demands.model | demands.resume
