"""The five levels, one after the other, for the files of one location or directory."""

from __future__ import annotations

from collections.abc import Sequence

from ckptsync.records.model_record import ModelTensor
from ckptsync.records.report import LEVELS, Level, Reading, VerifyFinding
from ckptsync.verify.expected import ExpectedFile
from ckptsync.verify.level_digest import Sample, check_crc32s, check_digests
from ckptsync.verify.level_load import load_files, load_model
from ckptsync.verify.level_parse import check_checkpoint, check_model
from ckptsync.verify.reading import CountedSource, TrackedFiles

Tensors = Sequence[ModelTensor] | None


class LevelChecks:
    """Checks some files level by level, and collects findings and readings.

    ``files`` are expected, and ``there`` with their sizes.  ``trees`` are those of the checkpoint,
    and of a consolidated model, that are there.  Level digest compares CRC32s where nothing
    ``has_digests``; else level load does, for damage from before digests were recorded.
    """

    def __init__(
        self,
        source: CountedSource,
        files: Sequence[ExpectedFile],
        there: Sequence[ExpectedFile],
        trees: Sequence[TrackedFiles],
        sample: Sample | None = None,
        *,
        has_digests: bool = True,
    ) -> None:
        self._source, self._files, self._there, self._trees = source, files, there, trees
        self._own, self._sample, self._has_digests = trees[0], sample, has_digests
        self._loaded = 0
        self.findings: list[VerifyFinding] = []
        self.readings: list[Reading] = []

    def close(self) -> None:
        """End the threads that read ahead."""
        for tree in self._trees:
            tree.close()

    @property
    def read(self) -> int:
        """Bytes that were read."""
        return self._source.read + sum(tree.read for tree in self._trees) + self._loaded

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
            self._model(self._own if tensors is None else self._trees[-1])

    def _add(self, level: Level, files: int, size: int, tensors: int = 0) -> Reading:
        of_size = sum(f.size for f in self._files)
        self.readings.append(Reading(level, files, size, len(self._files), of_size, tensors))
        return self.readings[-1]

    def _digest(self) -> None:
        sample = self._sample
        if self._has_digests:
            recorded = [f for f in self._there if f.recorded.digest]
            found, files, size = check_digests(self._source, recorded, self._own, sample)
        else:
            found, files, size = check_crc32s(self._own, "digest")
        self.findings += found
        of = self._add("digest", files, size)
        share = f"{size} of {of.of_size} bytes, in {files} of {of.of_files} files, were compared"
        if sample:
            percent = 100 * size / of.of_size if of.of_size else 100.0
            share = f"a sample ({percent:.1f} %): {share}; nothing is known of the others"
            self.findings.append(VerifyFinding("note", self._own.title, share))
        elif size and not self._has_digests:
            self.findings.append(VerifyFinding("note", self._own.title, f"the CRC32s of {share}"))

    def _parse(self, tensors: Tensors, *, has_shards: bool) -> None:
        trees = self._trees
        before = sum(tree.read for tree in trees)
        if has_shards:
            self.findings += check_checkpoint(self._own)
        if tensors is not None:
            self.findings += check_model(trees[-1], tensors)
        read = sum(tree.read for tree in trees) - before
        count = sum(tree.tensors for tree in trees)
        self._add("parse", sum(len(tree.seen) for tree in trees), read, count)

    def _load(self) -> None:
        files = [f for f in self._there if not f.is_copy]
        found, reading = load_files(self._source, files, self._own)
        self._loaded += reading.size
        self.findings += found
        self.readings.append(reading)
        if self._has_digests:
            self.findings += check_crc32s(self._own, "load")[0]

    def _model(self, tree: TrackedFiles) -> None:
        is_own = tree is self._own
        files = {f.path: f for f in self._there if (f.is_own if is_own else f.is_consolidated)}
        found, reading = load_model(self._source, files, tree.title)
        self.findings += found
        self.readings.append(reading)
