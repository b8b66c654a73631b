"""`CkptSyncRayCallback` uses Ray's internals: versions that nobody has tried are refused."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from ckptsync.errors import ConfigError
from ckptsync.hooks import ray as names


@pytest.mark.parametrize(
    ("version", "why"),
    [
        ("2.61.0", "not been tried"),
        ("3.0.0.dev0", "not been tried"),
        ("2.31.0", "ray.train"),
        ("2.60.0", "ray.train"),  # as if that had moved
    ],
)
def test_other_versions_of_ray_are_refused_with_what_works_instead(
    monkeypatch: pytest.MonkeyPatch, version: str, why: str
) -> None:
    monkeypatch.delitem(sys.modules, "ckptsync.hooks.ray_callback", raising=False)
    for module in [name for name in sys.modules if name.partition(".")[0] == "ray"]:
        monkeypatch.delitem(sys.modules, module)
    stand_ins = {name: ModuleType(name) for name in ("ray", "ray.exceptions")}
    vars(stand_ins["ray"])["__version__"] = version
    vars(stand_ins["ray.exceptions"])["RayTaskError"] = RuntimeError
    for name, stand_in in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, stand_in)
    with pytest.raises(ConfigError, match=f"Ray {version} is not supported: .*{why}") as caught:
        vars(names)["__getattr__"]("CkptSyncRayCallback")
    assert "ray[train]>=2.51,<2.61" in caught.value.hint
    assert "setup_worker" in caught.value.hint
