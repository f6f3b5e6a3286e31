"""The simulated device computes what the CPU computes, and is as strict as a device."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def change_views(x: Tensor) -> Tensor:
    x = x.clone()
    x[1].add_(1)
    x[:, 2] = 5
    x.t()[3].mul_(2)
    x[x > 4] = 7
    x[torch.tensor([0, 2])] -= 1
    return x


EXPRESSIONS: dict[str, Callable[[Tensor], Any]] = {
    "product": lambda x: x @ x.t() + 1,
    "softmax": lambda x: x.softmax(-1).log(),
    "views": change_views,
    "joined": lambda x: torch.cat([x, x[:2] * 2])[1::2].contiguous(),
    "top": lambda x: x.topk(3),
    "choice": lambda x: torch.where(x > 0, x, x.new_zeros(())).nonzero(),
    "windows": lambda x: x.unfold(1, 3, 2).sum(-1),
    "lower precision": lambda x: (x.bfloat16() @ x.bfloat16().t()).float(),
    "bytes": lambda x: x.view(torch.int32) >> 3,
    "many": lambda x: torch._foreach_norm([x, x * 2]),
    "scan": lambda x: x.double().cumsum(0).norm(),
    "attention": lambda x: functional.scaled_dot_product_attention(*[x.view(1, 1, 8, 8)] * 3, is_causal=True),
}


def evaluate(name: str) -> None:
    x = numbers(8, 8)
    found, expected = EXPRESSIONS[name](x.npu()), EXPRESSIONS[name](x)
    several = isinstance(expected, (tuple, list))
    for one, other in zip(found if several else [found], expected if several else [expected], strict=True):
        assert one.device == torch.device("npu", 0)
        if name == "attention":  # the CPU has a kernel of its own for it
            torch.testing.assert_close(one.cpu(), other, rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(one.cpu(), other)


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_arithmetic(name: str, npu_world: Any) -> None:
    npu_world(1)(evaluate, name)


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Embedding(16, 8),
        torch.nn.Linear(8, 32),
        torch.nn.GELU(),
        torch.nn.LayerNorm(32),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(32, 16),
    )


def train(device: str, **kind: bool) -> list[Tensor]:
    model = network().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **kind)
    ids = torch.arange(24).view(4, 6) % 16
    torch.manual_seed(1)
    for _ in range(3):
        loss = functional.cross_entropy(model(ids.to(device)).flatten(0, 1), ids.flatten().to(device))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    assert all(tensor.device.type == device for tensor in model.parameters())
    return [loss.detach().cpu(), *(parameter.detach().cpu() for parameter in model.parameters())]


def compare_training(kind: dict[str, bool]) -> None:
    for found, expected in zip(train("npu", **kind), train("cpu", **kind), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_training(kind: dict[str, bool], npu_world: Any) -> None:
    """Module, autograd, dropout, clipping, AdamW in each of its forms."""
    npu_world(1)(compare_training, kind)


def recompute() -> None:
    from torch.utils.checkpoint import checkpoint

    model = network()[3:].to("npu")
    x = numbers(6, 32).npu().requires_grad_()
    gradients = []
    for run in (model, lambda x: checkpoint(model, x, use_reentrant=False)):
        torch.manual_seed(3)
        gradients.append(torch.autograd.grad(run(x).square().sum(), x)[0])
    assert torch.equal(*gradients)


def test_activation_checkpointing_draws_the_same_mask_again(npu_world: Any) -> None:
    npu_world(1)(recompute)


def autocast() -> None:
    layer = torch.nn.Linear(8, 8)
    x = numbers(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        expected = layer(x)
    expected.sum().backward()
    gradient, layer.weight.grad = layer.weight.grad, None
    layer.to("npu")
    with torch.npu.amp.autocast(dtype=torch.bfloat16):
        found = layer(x.npu())
        assert found.softmax(-1).dtype == torch.float32
        assert (found * x.npu()).dtype == torch.float32
        with torch.autocast("npu", enabled=False):
            assert layer(x.npu()).dtype == torch.float32
    assert found.dtype == torch.bfloat16
    assert torch.equal(found.cpu(), expected)
    found.sum().backward()
    assert torch.equal(layer.weight.grad.cpu(), gradient)


def test_autocast(npu_world: Any) -> None:
    npu_world(1)(autocast)


def draw(device: str) -> list[Tensor]:
    x = torch.ones(100, device=device)
    drawn = [
        torch.randn(7, device=device),
        torch.rand(7, device=device),
        torch.randint(0, 9, (7,), device=device),
        torch.randperm(9, device=device),
        functional.dropout(x),
        x.clone().uniform_(),
        torch.bernoulli(x / 2),
        torch.multinomial(x, 5),
    ]
    return [tensor.cpu() for tensor in drawn]


def draws_equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def draw_numbers() -> None:
    torch.manual_seed(5)
    assert draws_equal(draw("npu"), draw("cpu")), "a seed gives the numbers that the CPU draws"
    before = torch.get_rng_state()
    state = torch.npu.get_rng_state()
    drawn = draw("npu")
    assert torch.equal(torch.get_rng_state(), before), "the device draws from a generator of its own"
    assert not draws_equal(drawn, draw("npu"))
    torch.npu.set_rng_state(state)
    assert draws_equal(drawn, draw("npu"))

    other = torch.npu.get_rng_state(1)
    torch.npu.manual_seed(6)
    assert torch.equal(torch.npu.get_rng_state(1), other)
    torch.npu.manual_seed_all(6)
    assert not torch.equal(torch.npu.get_rng_state(1), other)

    generator = torch.Generator("npu").manual_seed(7)
    state = torch.npu.get_rng_state()
    given = torch.randn(5, device="npu", generator=generator)
    assert torch.equal(given.cpu(), torch.randn(5, generator=torch.Generator().manual_seed(7)))
    assert torch.equal(torch.npu.get_rng_state(), state)
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(5, device="npu", generator=torch.Generator())


def test_random_numbers(npu_world: Any) -> None:
    npu_world(1)(draw_numbers)


def count_memory() -> None:
    torch.npu.reset_peak_memory_stats()
    before, other = torch.npu.memory_allocated(), torch.npu.memory_allocated(1)
    x = torch.empty(1 << 20, device="npu")
    assert torch.npu.memory_allocated() == before + (4 << 20)
    free, total = torch.npu.mem_get_info()
    assert total - free == torch.npu.memory_allocated()
    assert total == torch.npu.get_device_properties().total_memory
    x.untyped_storage().resize_(0)
    assert torch.npu.memory_allocated() == before
    x.untyped_storage().resize_(8)
    assert torch.npu.memory_allocated() == before + 8
    with torch.npu.device(1):
        y = torch.empty(10, device="npu")
    assert y.device.index == 1
    assert torch.npu.memory_allocated(1) == other + 40
    del x, y
    torch.npu.empty_cache()
    assert torch.npu.memory_allocated() == before
    assert torch.npu.max_memory_allocated() >= before + (4 << 20)
    torch.npu.reset_peak_memory_stats()
    assert torch.npu.max_memory_allocated() == before


def test_memory_figures(npu_world: Any) -> None:
    npu_world(1)(count_memory)


def stream() -> None:
    default = torch.npu.current_stream()
    assert default == torch.npu.default_stream()
    side = torch.npu.Stream(priority=-1)
    start, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
    with torch.npu.stream(side):
        assert torch.npu.current_stream() == side != default
        start.record()
        x = torch.ones(3, device="npu") * 2
        x.record_stream(side)
        end.record()
    assert torch.npu.current_stream() == default
    default.wait_stream(side)
    default.wait_event(end)
    torch.npu.synchronize()
    assert end.query()
    assert start.elapsed_time(end) >= 0


def test_streams_and_events(npu_world: Any) -> None:
    npu_world(1)(stream)


def mix() -> None:
    x = torch.ones(3, device="npu:0")
    for other in (torch.ones(3), torch.ones(3, device="npu:1")):
        with pytest.raises(RuntimeError, match="same device"):
            x + other
        with pytest.raises(RuntimeError, match="same device"):
            torch._foreach_add_([x], [other])
        with pytest.raises(RuntimeError, match="same device"):
            torch.stack([x, other])
    assert torch.equal((x + torch.tensor(1.0)).cpu(), torch.full((3,), 2.0))
    with pytest.raises(RuntimeError):
        torch.npu.set_device(torch.npu.device_count())
    with pytest.raises(TypeError):
        x.numpy()


def test_tensors_of_other_devices_are_refused(npu_world: Any) -> None:
    npu_world(1)(mix)


def know() -> None:
    assert torch.npu.is_available()
    assert torch.npu.is_initialized()
    assert torch.accelerator.current_accelerator() == torch.device("npu")
    assert torch.get_device_module("npu") is torch.npu
    assert torch.npu.device_count() == 8
    assert torch.npu.get_device_name() == "Simulated NPU"
    file = io.BytesIO()
    x = numbers(3).npu()
    torch.save({"x": x}, file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["x"].device == x.device
    file.seek(0)
    assert torch.equal(torch.load(file, map_location="cpu")["x"], x.cpu())
    with torch.device("meta"):
        layer = torch.nn.Linear(3, 3)
    assert layer.to_empty(device="npu").weight.is_npu


def test_torch_knows_the_device(npu_world: Any) -> None:
    npu_world(1)(know)
