"""Weights and optimizer state as shards: every element once, at its place, at every layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engines.config import OptimizerConfig
from engines.contract import Shard
from engines.errors import CheckpointError
from engines.testing.tiny import tiny_folder
from engines.testing.world import World, WorldError
from support.chunks import Built, built
from support.megatron import FAMILIES, LAYOUTS, fits, settings

Worlds = Callable[[int], World]
STEP = 7


@dataclass
class Saved:
    """Tensors by key, read as core's checkpoints are."""

    tensors: Mapping[str, Tensor]

    def keys(self) -> frozenset[str]:
        return frozenset(self.tensors)

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self.tensors[key].shape)

    def read(self, key: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        index = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
        return self.tensors[key][index].clone()

    def read_into(self, key: str, offset: Sequence[int], target: Tensor) -> None:
        target.copy_(self.read(key, offset, target.shape))


def saved(folder: Path) -> Saved:
    """A checkpoint whose moments are functions of the weights, so that places can be told without `weights`."""
    found: dict[str, Tensor] = {}
    for name, value in load_file(folder / "model.safetensors").items():
        value = value + 1e-3  # noqa: PLW2901 (not what the folder holds, and not representable in bfloat16)
        found |= {
            f"model.{name}": value,
            f"optimizer.exp_avg.{name}": value * 2,
            f"optimizer.exp_avg_sq.{name}": value * 3,
            f"optimizer.step.{name}": torch.tensor(STEP),
        }
    return Saved(found)


def assemble(shards: Iterable[Shard]) -> dict[str, Tensor]:
    """Whole tensors; complains about an element that is written twice, or never."""
    whole: dict[str, Tensor] = {}
    for shard in shards:
        if shard.replica == 0:
            full = whole.setdefault(shard.key, torch.full(shard.global_shape, float("nan"), dtype=torch.float64))
            index = tuple(slice(o, o + n) for o, n in zip(shard.offset, shard.tensor.shape, strict=True))
            assert full[index].isnan().all(), f"{shard.key} is written twice"
            full[index] = shard.tensor.double()
    assert not [key for key, full in whole.items() if full.isnan().any()]
    return whole


def with_optimizer(model: Built, distributed: bool, dtype: str) -> Any:
    from engines_megatron.gradients import Gradients
    from engines_megatron.optimizer import Optimizer

    gradients = Gradients(model.chunks, model.transformer_config, distributed_optimizer=distributed)
    return Optimizer(gradients.modules, OptimizerConfig(), None, distributed=distributed, dtype=getattr(torch, dtype))


def load_and_save(folder: Path, how: dict[str, Any], dtype: str) -> tuple[list[Shard], list[Shard], list[str]]:
    """On each rank: model shards, optimizer shards, and what lies at a wrong place in between."""
    from engines_megatron.weights import load_model_shards, load_optimizer_shards, model_shards, optimizer_shards

    wrong = []
    with built(folder, how, dtype=dtype) as model:
        optimizer = with_optimizer(model.load(), how.get("distributed_optimizer", False), dtype)
        assert not list(optimizer_shards(model.chunks, model.architecture, optimizer))
        reader = saved(folder)
        load_model_shards(model.chunks, model.architecture, optimizer, reader)
        load_optimizer_shards(model.chunks, model.architecture, optimizer, reader)
        for state in optimizer.states():
            parameter, main = state.parameter.detach().flatten()[state.start : state.stop], state.main.flatten()
            pairs = {
                "parameter": (parameter, main.to(parameter.dtype)),
                "exp_avg": (state.moments["exp_avg"].flatten(), main * 2),
                "exp_avg_sq": (state.moments["exp_avg_sq"].flatten(), main * 3),
            }
            wrong += [name for name, (one, other) in pairs.items() if not one.equal(other)]
            wrong += ["step"] * (state.step != STEP)
        shards = [
            [Shard(s.key, s.global_shape, s.offset, s.tensor.clone(), s.replica) for s in found]
            for found in (
                model_shards(model.chunks, model.architecture, optimizer),
                optimizer_shards(model.chunks, model.architecture, optimizer),
            )
        ]
    return shards[0], shards[1], wrong


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            own = {"mlp_only_layers": [0, 1, 2]} if family.endswith("dense_first") else {}
            made[family] = tiny_folder(
                tmp_path_factory.mktemp("model"),
                family.removesuffix("_dense_first"),
                num_hidden_layers=5,
                vocab_size=251,
                **own,
            )
        return made[family]

    return get


SAMPLE = {
    ("llama", "single", "float32"),
    ("llama_tied", "tp2 pp2", "float32"),
    ("llama_tied", "pp2 dp2 distributed", "bfloat16"),
    ("qwen2", "tp2 cp2", "bfloat16"),
    ("qwen3", "pp2 dp2 distributed", "float32"),
    ("qwen3_moe", "tp2 ep2", "bfloat16"),
    ("qwen3_moe", "pp2 dp2 distributed", "bfloat16"),
    ("mixtral", "tp2 etp2", "float32"),
    ("qwen3_moe_dense_first", "pp2 ep2", "float32"),
}
DISTRIBUTED = {"tp2 cp2", "ep2", "pp2 ep2", "dp2", "tp2 etp2", "tp2 ep2"}
"""Layouts that are tried with the distributed optimizer, too."""


def _cases() -> Iterable[Any]:
    """Every model at every layout, in one of the two dtypes: each layout meets both."""
    for place, layout in enumerate(LAYOUTS):
        for turn, family in enumerate(family for family in FAMILIES if fits(family, layout)):
            dtypes = {dtype for one, at, dtype in SAMPLE if (one, at) == (family, layout)}
            for dtype in dtypes or {("float32", "bfloat16")[(place + turn) % 2]}:
                yield pytest.param(family, layout, dtype, {}, marks=() if dtypes else pytest.mark.more)
    for family in ("qwen3_moe", "llama_tied"):
        for layout in (layout for layout in LAYOUTS if layout in DISTRIBUTED and fits(family, layout)):
            yield pytest.param(family, layout, "bfloat16", {"distributed_optimizer": True})


@pytest.mark.parametrize(("family", "layout", "dtype", "more"), list(_cases()))
def test_what_is_loaded_lies_at_its_place_and_is_saved_once(
    family: str, layout: str, dtype: str, more: dict[str, Any], folders: Callable[[str], Path], world: Worlds
):
    folder = folders(family)
    found = world(LAYOUTS[layout].processes)(load_and_save, folder, settings(layout, **more), dtype)
    assert all(wrong == [] for _, _, wrong in found)
    wanted = saved(folder).tensors
    written = assemble(shard for model, optimizer, _ in found for shard in (*model, *optimizer))
    assert written.keys() == wanted.keys()
    assert [key for key in wanted if not written[key].equal(wanted[key].double())] == []


def save_without_optimizer(folder: Path, how: dict[str, Any]) -> list[Shard]:
    from engines_megatron.weights import load_model_shards, model_shards

    with built(folder, how) as model:
        load_model_shards(model.chunks, model.architecture, None, saved(folder))
        return [
            Shard(s.key, s.global_shape, s.offset, s.tensor.clone(), s.replica)
            for s in model_shards(model.chunks, model.architecture, None)
        ]


def test_an_engine_that_only_infers_loads_and_saves_its_weights(folders: Callable[[str], Path], world: Worlds):
    folder = folders("llama_tied")
    written = assemble(
        shard for shards in world(4)(save_without_optimizer, folder, settings("tp2 pp2")) for shard in shards
    )
    wanted = {key: value for key, value in saved(folder).tensors.items() if key.startswith("model.")}
    assert written.keys() == wanted.keys()
    assert all(written[key].equal(value.double()) for key, value in wanted.items())


def load_partly(folder: Path, how: dict[str, Any]) -> tuple[set[str], bool]:
    """Keys of the state after a checkpoint without any, loaded over one that had it; and whether padding is zero."""
    from engines_megatron.weights import load_model_shards, load_optimizer_shards, optimizer_shards

    with built(folder, how) as model:
        optimizer = with_optimizer(model.load(), False, "float32")
        reader = saved(folder)
        load_optimizer_shards(model.chunks, model.architecture, optimizer, reader)
        for chunk in model.chunks:
            if chunk.pre_process:
                chunk.embedding.word_embeddings.weight.detach().fill_(float("nan"))
        load_model_shards(model.chunks, model.architecture, optimizer, reader)
        finite = all(bool(p.isfinite().all()) for chunk in model.chunks for p in chunk.parameters())
        load_optimizer_shards(model.chunks, model.architecture, optimizer, Saved({}))
        return {shard.key for shard in optimizer_shards(model.chunks, model.architecture, optimizer)}, finite


def test_state_that_a_checkpoint_lacks_is_gone_and_filling_is_finite(folders: Callable[[str], Path], world: Worlds):
    assert world(2)(load_partly, folders("llama"), settings("tp2")) == [(set(), True)] * 2


def load_other(folder: Path, how: dict[str, Any]) -> None:
    from engines_megatron.weights import load_model_shards

    with built(folder, how) as model:
        tensors = dict(saved(folder).tensors)
        tensors["model.model.norm.weight"] = torch.zeros(3)
        load_model_shards(model.chunks, model.architecture, None, Saved(tensors))


def test_another_models_checkpoint_is_refused(folders: Callable[[str], Path], world: Worlds):
    with pytest.raises((WorldError, CheckpointError), match=r"model\.model\.norm\.weight has shape \(3,\)"):
        world(1)(load_other, folders("llama"), settings("single"))
