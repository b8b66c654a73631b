"""What lets go of checkpoints dies at every moment, in memory.

`make kill-gc`, which CI runs in short, kills real ones.
"""

from __future__ import annotations

import itertools

import pytest

from ckptsync.head.gc import apply_retention
from tests.campaigns.gc_scenes import Scene, differences, finished, harm, remembered, scenes
from tests.support.crashing_store import Crash, Dying
from tests.support.exhaustive import in_exhaustive

SCENES = scenes()


@pytest.mark.parametrize("scene", SCENES.values(), ids=lambda scene: scene.name)
def test_where_nobody_dies_nothing_is_harmed_and_it_ends(scene: Scene) -> None:
    store = remembered(
        {name: data for name, data in scene.files.items() if name not in scene.strays}
    )
    assert [
        *harm(store, scene),
        *finished(store, scene),
        *harm(store, scene),
        *differences(store, scene),
    ] == []


@in_exhaustive
@pytest.mark.parametrize(
    "scene", [SCENES["remove"], SCENES["shards"]], ids=lambda scene: scene.name
)
def test_dead_at_every_moment_in_memory_it_harms_nothing_and_the_next_one_ends_it(
    scene: Scene,
) -> None:
    for lives in itertools.count():
        store = remembered(scene.files)
        try:
            apply_retention(Dying(store, lives), scene.asked)
        except Crash:
            wrong = [*harm(store, scene)]
            apply_retention(store, scene.asked)
            wrong += [*finished(store, scene), *harm(store, scene), *differences(store, scene)]
            assert wrong == [], lives
        else:
            assert lives > 5
            return


def test_the_campaign_sees_what_is_harmed_half_there_and_left() -> None:
    scene = SCENES["remove"]
    for name, told in (
        ("run/checkpoint-4/a.bin", "checkpoint-4: was to be kept, and is not VERIFIED"),
        (
            "run/consolidated/checkpoint-3/model.safetensors",
            "checkpoint-3: was to be kept, and is not VERIFIED",
        ),
        ("other/checkpoint-1/b.bin", "other/checkpoint-1/b.bin: of another run"),
    ):
        store = remembered(scene.files)
        store.delete(name)
        assert told in list(harm(store, scene))
    store = remembered(SCENES["mark"].files)
    store.delete("run/checkpoint-2/a.bin")
    assert next(harm(store, scene)).startswith("run/checkpoint-2 is INCOMPLETE")
    assert list(finished(store, scene)) == []
    store.write("run/checkpoint-1/left.bin", [b"x"])
    assert "run/checkpoint-1/left.bin: is left" in list(differences(store, scene))
