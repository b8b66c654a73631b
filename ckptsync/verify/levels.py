"""The five levels, one after the other, for the files of one location or directory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckptsync.records.model_record import ModelTensor
from ckptsync.records.report import LEVELS, Level, Reading, VerifyFinding
from ckptsync.stores.prefetch import fetched
from ckptsync.stores.stream import Reads
from ckptsync.tensors import Files
from ckptsync.verify.expected import ExpectedFile
from ckptsync.verify.level_digest import Sample, check_crc32s, check_digests
from ckptsync.verify.level_load import load_files, load_model
from ckptsync.verify.level_parse import check_checkpoint, check_model
from ckptsync.verify.reading import CountedSource, Progress, TrackedFiles, no_progress

Tensors = Sequence[ModelTensor] | None


class LevelChecks:
    """Checks some files level by level, and collects findings and readings.

    ``files`` are expected, and ``there`` with their sizes.  ``own`` and ``model`` are those of the
    checkpoint and of the consolidated model that are there.  Level digest compares CRC32s where
    nothing ``has_digests``; else level load does, for damage from before digests were recorded.
    """

    own: TrackedFiles
    model: TrackedFiles | None = None
    has_digests = True

    def __init__(
        self,
        source: Reads,
        files: Sequence[ExpectedFile],
        there: Sequence[ExpectedFile],
        sample: Sample | None = None,
        progress: Progress = no_progress,
    ) -> None:
        self._source = CountedSource(source, progress)
        self._files, self._there = files, there
        self._sample, self._progress = sample, progress
        self._loaded = 0
        self.findings: list[VerifyFinding] = []
        self.readings: list[Reading] = []

    def track(self, files: Files, title: str, named: Iterable[ExpectedFile]) -> TrackedFiles:
        """Return files that remember what was read of them, read ahead if they are far."""
        shown = {f.path: f.shown for f in named}
        inner = self._source.source
        return TrackedFiles(fetched(files, inner), title, shown, self._progress)

    def close(self) -> None:
        """End the threads that read ahead."""
        for tree in self._trees():
            tree.close()

    @property
    def read(self) -> int:
        """Bytes that were read."""
        return self._source.read + sum(tree.read for tree in self._trees()) + self._loaded

    def check(self, level: Level, tensors: Tensors = None, *, has_shards: bool = True) -> None:
        """Check every level above stat, up to this one.

        ``tensors`` are the model record's.
        """
        height = LEVELS.index(level)
        self._add("stat", len(self._there), sum(f.size for f in self._there))
        if height >= LEVELS.index("digest"):
            self._digest()
        if height >= LEVELS.index("parse"):
            self._parse(tensors, has_shards=has_shards)
        if height >= LEVELS.index("load"):
            self._load()
        if height >= LEVELS.index("model"):
            self._model(self.own if tensors is None else self.model or self.own)

    def _trees(self) -> list[TrackedFiles]:
        return [self.own, self.model] if self.model else [self.own]

    def _add(self, level: Level, files: int, size: int, tensors: int = 0) -> Reading:
        of_size = sum(f.size for f in self._files)
        self.readings.append(Reading(level, files, size, len(self._files), of_size, tensors))
        return self.readings[-1]

    def _digest(self) -> None:
        sample = self._sample
        if self.has_digests:
            recorded = [f for f in self._there if f.recorded.digest]
            found, files, size = check_digests(self._source, recorded, self.own, sample)
        else:
            found, files, size = check_crc32s(self.own, "digest")
        self.findings += found
        of = self._add("digest", files, size)
        share = f"{size} of {of.of_size} bytes, in {files} of {of.of_files} files, were compared"
        if sample:
            percent = 100 * size / of.of_size if of.of_size else 100.0
            share = f"a sample ({percent:.1f} %): {share}; nothing is known of the others"
            self.findings.append(VerifyFinding("note", self.own.title, share))
        elif size and not self.has_digests:
            self.findings.append(VerifyFinding("note", self.own.title, f"the CRC32s of {share}"))

    def _parse(self, tensors: Tensors, *, has_shards: bool) -> None:
        trees = self._trees()
        before = sum(tree.read for tree in trees)
        if has_shards:
            self.findings += check_checkpoint(self.own)
        if self.model and tensors is not None:
            self.findings += check_model(self.model, tensors)
        read = sum(tree.read for tree in trees) - before
        count = sum(tree.tensors for tree in trees)
        self._add("parse", sum(len(tree.seen) for tree in trees), read, count)

    def _load(self) -> None:
        files = [f for f in self._there if not f.is_copy]
        found, reading = load_files(self._source, files, self.own)
        self._loaded += reading.size
        self.findings += found
        self.readings.append(reading)
        if self.has_digests:
            self.findings += check_crc32s(self.own, "load")[0]

    def _model(self, tree: TrackedFiles) -> None:
        is_own = tree is self.own
        files = {f.path: f for f in self._there if (f.is_own if is_own else f.is_consolidated)}
        found, reading = load_model(self._source, files, tree.title)
        self.findings += found
        self.readings.append(reading)
