"""Which files say that a device is here, and what an engine on it lacks where they do."""

from __future__ import annotations

import glob
from pathlib import Path

import pytest

from engines.devices import BUILT_IN, DeviceSpec, presence
from engines.discovery import Discovery
from engines.registry import Registry


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What stands in for `/` when device nodes are looked for, in a process that knows nothing else of devices."""
    for spec in BUILT_IN.values():
        monkeypatch.delenv(spec.visible_devices_env or "ENGINES_DEVICE", raising=False)
    monkeypatch.setattr("engines.devices._ask_imported_torch", lambda _: None)
    find = glob.glob
    monkeypatch.setattr(glob, "glob", lambda pattern: find(f"{tmp_path}{pattern}"))
    return tmp_path


@pytest.mark.parametrize(
    ("device", "node", "present"),
    [
        ("npu", "dev/davinci0", True),
        ("npu", "dev/davinci15", True),
        ("npu", "dev/davinci_manager", False),
        ("npu", "dev/nvidia0", False),
        ("cuda", "dev/nvidia0", True),
        ("cuda", "dev/nvidiactl", False),
        ("cuda", "dev/kfd", True),
        ("cuda", "usr/lib/wsl/lib/libcuda.so.1", True),
        ("cuda", "dev/dxg", False),
        ("cuda", "dev/davinci0", False),
    ],
)
def test_its_nodes(root: Path, device: str, node: str, present: bool) -> None:
    (root / node).parent.mkdir(parents=True)
    (root / node).touch()
    found = presence(BUILT_IN[device])
    assert found.present == present
    assert found.how == (f"{root / node} exists" if present else "no such device here")
    assert found.looked_for == (() if present else BUILT_IN[device].nodes)


class Engine:
    pass


@pytest.mark.parametrize(
    ("install", "remedy"),
    [(None, "install the package that brings absent_chip"), ("follow its guide", "follow its guide")],
)
def test_without_the_module_that_makes_torch_know_it(root: Path, install: str | None, remedy: str) -> None:
    (root / "dev").mkdir()
    (root / "dev/chip0").touch()
    chip = DeviceSpec("chip", 1, ("/dev/chip*",), "absent_chip", "gloo", None, "chip", install)
    registry = Registry(discover=lambda: Discovery((), ()))
    registry.register(
        backend="one", model_type="language_model", device="chip", engine=Engine, config=Engine, devices=[chip]
    )
    (candidate,) = registry.candidates()
    state = registry.availability(candidate)
    assert (state.status, state.reason, state.remedy) == ("unavailable", "needs absent_chip, not installed", remedy)
