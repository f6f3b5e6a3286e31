"""Each service of a device does what it says, on the CPU and on a simulated NPU."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import torch

from engines.device_services import DeviceServices


def serve(name: str) -> None:
    """What every device has."""
    device = torch.device(name)
    services = DeviceServices(device)
    services.select()

    state = services.rng_state()
    host = torch.get_rng_state()
    drawn = torch.rand(5, device=device)
    assert services.is_accelerator == torch.equal(torch.get_rng_state(), host), (
        "a generator of its own, or the host's"
    )
    assert not torch.equal(torch.rand(5, device=device), drawn)
    services.set_rng_state(state)
    assert torch.equal(torch.rand(5, device=device), drawn)

    x = torch.ones(2, 2, device=device)
    with services.autocast(torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
    assert (x @ x).dtype == torch.float32

    services.free_cached_memory()
    services.synchronize()
    assert services.current_stream() == torch.get_device_module(device).current_stream()


def test_on_the_cpu(world: Any) -> None:
    world(1)(serve, "cpu")
    services = DeviceServices(torch.device("cpu"))
    services.reset_peak_memory()
    assert services.memory() is None
    assert not services.is_in_use(), "what starts with the process is no accelerator's library"


def count() -> None:
    """On the second device of two, whose figures are not the current one's."""
    services = DeviceServices(torch.device("npu", 1))
    before = services.memory()
    assert before is not None
    x = torch.empty(1 << 20, device=services.device)
    held = services.memory()
    assert held is not None
    assert held.allocated - before.allocated == 4 << 20
    del x
    freed = services.memory()
    assert freed is not None
    assert (freed.allocated, freed.peak) == (before.allocated, held.allocated)
    services.reset_peak_memory()
    anew = services.memory()
    assert anew is not None
    assert anew.peak == before.allocated
    assert services.is_in_use()


def test_on_a_simulated_npu(npu_world: Any) -> None:
    npu_world(1)(serve, "npu:0")
    npu_world(1)(count)


def draw_on_the_second() -> None:
    first, second = (DeviceServices(torch.device("npu", index)) for index in range(2))
    state = first.rng_state()
    second.set_rng_state(state)
    torch.rand(5, device=second.device)
    assert torch.equal(first.rng_state(), state)
    assert not torch.equal(second.rng_state(), state)


def test_each_of_two_has_its_generator(npu_world: Any) -> None:
    npu_world(1)(draw_on_the_second)


def test_found_without_importing_torch() -> None:
    code = "import engines.device_services, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
