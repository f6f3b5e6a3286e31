"""No setting is accepted and ignored: each field, set to a second value, makes a difference or is refused.

A field without a row here fails the test.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from engines.config import EngineConfig, ModelConfig, OptimizerConfig
from engines.contract import hookimpl
from engines.errors import CapabilityError, ConfigError, EngineNotFound, EnginesError, LaunchError
from engines.losses import SFTLoss
from engines.testing.runs import pack, weights_of
from engines.testing.samples import mini_batches
from engines.testing.tiny import tiny_folder
from engines.worker import TrainingWorker
from engines_fsdp.config import FSDP2Config
from engines_megatron.config import MegatronConfig

MODEL = {"dtype": "float32"}
ENGINE = {"strategy": "fsdp2", "device": "cpu"}
MEGATRON = {"strategy": "megatron"}
OPTIMIZER = {"lr": 1e-3, "eps": 1e-4, "clip_grad": 1.0}
STEPS = 3
LAYERS = 4


@dataclass(frozen=True)
class Row:
    """A second value of a field, and what it must do."""

    value: Any
    differs: str = ""
    """What is different, a key of what `observe` returns."""
    refused: type[Exception] | None = None
    said: str = ""
    beside: dict[str, Any] = field(default_factory=dict)
    """Other settings of both runs."""


def undeclared(value: Any, capability: str, by: str = "fsdp2") -> Row:
    return Row(value, refused=CapabilityError, said=f"{value!r} needs the capability {capability}, which {by}")


def no_experts(value: Any) -> Row:
    return Row(value, refused=ConfigError, said=f"{value!r} is about experts, and this llama model has none")


MODEL_ROWS = {
    "path": Row("another", differs="losses"),
    "dtype": Row("bfloat16", differs="losses"),
}
OPTIMIZER_ROWS = {
    "lr": Row(2e-3, differs="weights"),
    "betas": Row((0.8, 0.99), differs="weights"),
    "eps": Row(1e-3, differs="weights"),
    "weight_decay": Row(0.1, differs="weights"),
    "clip_grad": Row(None, differs="weights"),
    "schedule": Row("linear", differs="lrs"),
    "warmup_steps": Row(2, differs="lrs"),
}
ENGINE_ROWS = {
    "strategy": Row("fsdp3", refused=EngineNotFound, said="fsdp3"),
    "device": Row("abacus", refused=LaunchError, said="abacus"),
    "micro_batch_size": Row(2, differs="micro_batches"),
    "max_tokens_per_micro_batch": Row(128, differs="micro_batches"),
    "data_parallel_replicate_size": Row(2, differs="parameters"),
    "tensor_parallel_size": undeclared(2, "tensor_parallel"),
    "sequence_parallel": undeclared(True, "sequence_parallel"),
    "pipeline_parallel_size": undeclared(2, "pipeline_parallel"),
    "virtual_pipeline_parallel_size": undeclared(2, "virtual_pipeline_parallel"),
    "context_parallel_size": undeclared(2, "context_parallel"),
    "expert_parallel_size": undeclared(2, "expert_parallel"),
    "expert_tensor_parallel_size": undeclared(2, "expert_tensor_parallel"),
    "activation_checkpointing": Row(True, differs="layer_forwards"),
    "moe_aux_loss_coefficient": undeclared(0.1, "moe_aux_loss"),
    "lora_rank": undeclared(8, "lora"),
}
FSDP2_ROWS = {
    "reshard_after_forward": Row(False, differs="gathers"),
    "accumulate_gradients": Row("sharded", differs="reductions", beside={"micro_batch_size": 2}),
}
MEGATRON_ENGINE_ROWS = {
    "strategy": Row("fsdp2", differs="parameters"),
    "device": Row("abacus", refused=LaunchError, said="abacus"),
    "micro_batch_size": Row(2, differs="micro_batches"),
    "max_tokens_per_micro_batch": Row(128, differs="micro_batches"),
    "data_parallel_replicate_size": undeclared(2, "hybrid_shard", "megatron"),
    "tensor_parallel_size": Row(2, differs="parameters"),
    "sequence_parallel": Row(True, differs="calls", beside={"tensor_parallel_size": 2}),
    "pipeline_parallel_size": Row(2, differs="parameters"),
    "virtual_pipeline_parallel_size": Row(2, differs="layer_forwards", beside={"pipeline_parallel_size": 2}),
    "context_parallel_size": Row(2, differs="micro_batches"),
    "expert_parallel_size": no_experts(2),
    "expert_tensor_parallel_size": no_experts(2),
    "activation_checkpointing": Row(True, differs="layer_forwards"),
    "moe_aux_loss_coefficient": no_experts(0.1),
    "lora_rank": undeclared(8, "lora", "megatron"),
}
MEGATRON_ROWS = {
    "distributed_optimizer": Row(True, differs="calls"),
    "pipeline_layers": Row((1, 3), differs="parameters", beside={"pipeline_parallel_size": 2}),
    "recompute": Row("selective", differs="layer_forwards", beside={"activation_checkpointing": True}),
}
SECTIONS = {
    "model": MODEL_ROWS,
    "engine": ENGINE_ROWS | FSDP2_ROWS,
    "optimizer": OPTIMIZER_ROWS,
    "megatron": MEGATRON_ENGINE_ROWS | MEGATRON_ROWS,
}
"""Rows of `megatron` are of `engine` too, over another strategy."""


def test_every_field_has_a_row():
    fields = FSDP2Config.model_fields.keys()
    assert ENGINE_ROWS.keys() == EngineConfig.model_fields.keys()
    assert FSDP2_ROWS.keys() == fields - EngineConfig.model_fields.keys()
    assert MEGATRON_ENGINE_ROWS.keys() == EngineConfig.model_fields.keys()
    assert MEGATRON_ROWS.keys() == MegatronConfig.model_fields.keys() - EngineConfig.model_fields.keys()
    assert OPTIMIZER_ROWS.keys() == OptimizerConfig.model_fields.keys()
    assert MODEL_ROWS.keys() == ModelConfig.model_fields.keys()


class Watch:
    """Counts micro-batches, and the forwards of the first layer's MLP, recomputed ones included."""

    def __init__(self) -> None:
        self.micro_batches: list[list[int]] = []
        self.layer_forwards = 0
        self._watching = False

    @hookimpl(wrapper=True)
    def forward_micro_batch(self, chunk, micro_batch):
        if not self._watching:
            first = next(module for name, module in chunk.named_modules() if name.endswith("layers.0.mlp"))
            first.register_forward_pre_hook(self._count)
            self._watching = True
        self.micro_batches.append(micro_batch.lengths)
        return (yield)

    def _count(self, *_: object) -> None:
        self.layer_forwards += 1


class Collectives(TorchDispatchMode):
    """Counts collectives by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            self.calls[function.__name__.partition(".")[0]] += 1
        return function(*args, **(kwargs or {}))


def observe(model, engine, optimizer) -> dict[str, Any]:
    """All that settings can change, on one rank."""
    watch = Watch()
    with TrainingWorker(model, engine, optimizer, total_steps=STEPS, wrappers=[watch]) as worker:
        worker.initialize()
        collectives = Collectives()
        # attention across ranks makes a tensor of a subclass of torch's, which torch can't under a dispatch mode
        with collectives if engine.get("context_parallel_size", 1) == 1 else nullcontext():
            metrics = [worker.train_mini_batch(pack(samples), SFTLoss()) for samples in mini_batches()]
        return {
            "losses": [one["loss"] for one in metrics],
            "lrs": [one["lr"] for one in metrics],
            "weights": {name: value.tolist() for name, value in weights_of(worker).items()},
            "micro_batches": watch.micro_batches,
            "layer_forwards": watch.layer_forwards,
            "gathers": collectives.calls["_allgather_base_"],
            "reductions": collectives.calls["_reduce_scatter_base_"],
            "calls": dict(collectives.calls),
            "parameters": worker.describe()["parameters_per_rank"],
        }


def attempt(model, engine, optimizer) -> dict[str, Any] | Exception:
    """The same, or what refused it."""
    try:
        return observe(model, engine, optimizer)
    except EnginesError as error:
        return error


@pytest.fixture(scope="module")
def run(world, tmp_path_factory):
    """`run(model=..., engine=..., optimizer=...)`: what rank 0 observed with these settings over the defaults."""
    folders = {
        name: str(tiny_folder(tmp_path_factory.mktemp(name), "llama", seed=seed, num_hidden_layers=LAYERS))
        for seed, name in enumerate(("default", "another"))
    }
    known: dict[str, Any] = {}

    def with_settings(model=None, engine=None, optimizer=None):
        settings = {**MODEL, **(model or {})}, {**ENGINE, **(engine or {})}, {**OPTIMIZER, **(optimizer or {})}
        key = repr(settings)
        if key not in known:
            folder = folders[settings[0].pop("path", "default")]
            known[key] = world(2)(attempt, {"path": folder, **settings[0]}, *settings[1:])[0]
        return known[key]

    return with_settings


OFTEN = ("distributed_optimizer", "pipeline_layers", "recompute", "context_parallel_size", "lora_rank")
"""Rows of Megatron that `make test` runs."""


@pytest.mark.parametrize(
    ("section", "name"),
    [
        pytest.param(section, name, marks=pytest.mark.more if section == "megatron" and name not in OFTEN else ())
        for section, rows in SECTIONS.items()
        for name in rows
    ],
)
def test_no_field_is_ignored(section, name, run):
    row = SECTIONS[section][name]
    base = MEGATRON if section == "megatron" else {}
    section = "engine" if section == "megatron" else section
    found = run(**{section: {**base, **row.beside, name: row.value}})
    if row.refused is not None:
        assert type(found) is row.refused
        assert row.said in str(found)
        return
    before = run(**{section: {**base, **row.beside}})
    assert isinstance(before, dict) and isinstance(found, dict), (before, found)
    assert found[row.differs] != before[row.differs]


def test_equal_settings_make_no_difference(world, run, tmp_path):
    """Or every row above would pass."""
    folder = str(tiny_folder(Path(tmp_path), "llama", num_hidden_layers=LAYERS))
    assert world(2)(attempt, {"path": folder, **MODEL}, ENGINE, OPTIMIZER)[0] == run()


@pytest.mark.parametrize(
    ("model", "section", "value"),
    [
        (OptimizerConfig, "clip_grad", 0),
        (OptimizerConfig, "clip_grad", -1.0),
        (OptimizerConfig, "clip_grad", float("nan")),
        (OptimizerConfig, "clip_grad", float("inf")),
        (OptimizerConfig, "lr", 0),
        (OptimizerConfig, "lr", float("nan")),
        (OptimizerConfig, "betas", (0.9, 1.0)),
        (OptimizerConfig, "eps", 0.0),
        (OptimizerConfig, "weight_decay", -0.1),
        (OptimizerConfig, "warmup_steps", -1),
        (OptimizerConfig, "schedule", "cosin"),
        (EngineConfig, "micro_batch_size", 0),
        (EngineConfig, "max_tokens_per_micro_batch", 0),
        (EngineConfig, "tensor_parallel_size", 0),
        (EngineConfig, "moe_aux_loss_coefficient", float("nan")),
        (FSDP2Config, "accumulate_gradients", "both"),
        (MegatronConfig, "pipeline_layers", (0,)),
        (MegatronConfig, "recompute", "both"),
    ],
)
def test_values_that_mean_nothing_are_refused(model, section, value):
    from engines.configuring import validate

    with pytest.raises(ConfigError, match=section):
        validate(model, {section: value})


def test_collectives_are_seen(run):
    counted = run()
    assert counted["gathers"] > counted["reductions"] > 0
