"""Settings that every engine understands; validated before torch is imported.

Each setting has one home. A field that only some engines can honour names the capability that it needs; a
value other than its default is refused at configuration where the engine doesn't declare it (`configuring`). What
depends on the model or on the number of processes is refused there too, by `EngineConfig.check`.
"""

from __future__ import annotations

import math
import os
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo

from engines.errors import NO_URLS, LaunchError
from engines.paths import why_no_path

Positive = Annotated[int, Field(ge=1, lt=2**31)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


def needs(capability: str, default: Any, description: str, **kwargs: Any) -> Any:
    """A field whose values other than `default` need `capability` of the engine."""
    return Field(default, description=description, json_schema_extra={"capability": capability}, **kwargs)


def capability_of(info: FieldInfo) -> str | None:
    """The capability that a field needs of an engine; None for one that every engine takes."""
    extra = info.json_schema_extra
    return str(extra["capability"]) if isinstance(extra, dict) and "capability" in extra else None


class Config(BaseModel):
    """Base of all settings: unknown keys are refused, instances don't change, docs live on the fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())

    @field_validator("*", mode="before")
    @classmethod
    def _no_number_from_a_bool(cls, value: Any, info: ValidationInfo) -> Any:
        """Python counts True as 1, and `steps: true` as one step."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        values = value if isinstance(value, list | tuple) else (value,)
        if any(isinstance(one, bool) for one in values) and bool not in (annotation, *get_args(annotation)):
            raise ValueError("must not be true or false")
        return value


def _local_path(path: str) -> str:
    if "://" in path:
        raise ValueError(f"must not be a URL: {NO_URLS[0].lower()}{NO_URLS[1:]}")
    if fault := why_no_path(path):
        raise ValueError(fault)
    return path


LocalPath = Annotated[str, AfterValidator(_local_path)]
"""A file or folder of a file system; all ranks see the same."""


class ModelConfig(Config):
    """Which model, and in which precision it computes."""

    path: LocalPath
    """Folder of a Hugging Face model: config.json, safetensors, and a tokenizer where the data needs one; or a
    checkpoint of any engine, of which the weights alone are taken."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the computation; parameters and reductions stay in float32 under bfloat16."""

    @field_validator("path")
    @classmethod
    def _at_home(cls, path: str) -> str:
        return os.path.expanduser(path)


class OptimizerConfig(Config):
    """AdamW, gradient clipping and the learning-rate schedule."""

    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-5
    """Peak learning rate."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """Decay rates of AdamW's two moments."""
    eps: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-8
    """Added to AdamW's denominator."""
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Decoupled weight decay, on every parameter."""
    clip_grad: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = 1.0
    """Gradients are multiplied by min(1, clip_grad / (grad_norm + 1e-6)); null: never."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: constant, or linear or cosine to 0 at the last step."""
    warmup_steps: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Step k <= warmup_steps uses lr * k / warmup_steps."""


class EngineConfig(Config):
    """What all engines share; a plugin's own config class adds its fields to these."""

    strategy: Annotated[str, Field(min_length=1)] | None = None
    """The backend, as `engines list` shows it; `backend@distribution` picks an owner; null: the best available."""
    device: Annotated[str, Field(min_length=1)] | None = None
    """Device name; null: ENGINES_DEVICE, else the best device that is present and that the backend supports."""
    micro_batch_size: Positive | None = None
    """Samples per micro-batch and data-parallel rank."""
    max_tokens_per_micro_batch: Positive | None = None
    """Rows per micro-batch and rank; samples are grouped so that none holds more."""
    data_parallel_replicate_size: Positive = needs(
        "hybrid_shard", 1, "Replicas of the sharded model (HSDP); parameters are sharded within each."
    )
    tensor_parallel_size: Positive = needs("tensor_parallel", 1, "Ranks that share each weight matrix.")
    sequence_parallel: bool = needs("sequence_parallel", False, "Shard activations over the tensor-parallel ranks.")
    pipeline_parallel_size: Positive = needs("pipeline_parallel", 1, "Pipeline stages.")
    virtual_pipeline_parallel_size: Positive = needs("virtual_pipeline_parallel", 1, "Model chunks per stage.")
    context_parallel_size: Positive = needs("context_parallel", 1, "Ranks that share each sequence.")
    expert_parallel_size: Positive = needs("expert_parallel", 1, "Ranks that share the experts.")
    expert_tensor_parallel_size: Positive = needs("expert_tensor_parallel", 1, "Ranks that share each expert.")
    activation_checkpointing: bool = needs(
        "activation_checkpointing", False, "Recompute each layer in the backward pass instead of keeping it."
    )
    moe_aux_loss_coefficient: Annotated[float, Field(ge=0, allow_inf_nan=False)] = needs(
        "moe_aux_loss", 0.0, "Weight of the routers' load-balancing loss, whatever the model's config says."
    )
    lora_rank: Annotated[int, Field(ge=0, lt=2**31)] = needs(
        "lora", 0, "Rank of LoRA adapters; 0: train all weights."
    )

    @model_validator(mode="after")
    def _one_batching_rule(self) -> EngineConfig:
        if self.micro_batch_size is not None and self.max_tokens_per_micro_batch is not None:
            raise ValueError(
                "micro_batch_size and max_tokens_per_micro_batch both say how to cut micro-batches; set one of them"
            )
        return self

    def check(self, model: ModelConfig, *, model_type: str, world_size: int) -> None:
        """Refuse what this engine can't do with these settings for `model` on `world_size` processes.

        Called after the capabilities are checked: by a recipe before any process starts, and by `engines.create` on
        every rank, before the engine is constructed. A plugin's own class overrides this for what only that engine
        knows (heads that its tensor parallelism can't divide, an architecture that it can't build), and either
        calls `super().check` or says itself what this one does. It must be pure and quick, must not import torch,
        and may read the model's config.json with `engines.model_folder.read_config(model.path)`. `model_type`:
        "language_model" or "value_model".

        Raises `ConfigError`, `ModelError` or `LaunchError`, with the reason, the remedy, and preferably all faults
        at once. Here: `LaunchError` if tensor, pipeline and context parallelism don't divide the processes.
        """
        sizes = {name: getattr(self, name) for name in REPLICA_SIZES if getattr(self, name) > 1}
        replica = math.prod(sizes.values())
        if world_size % replica:
            product = " * ".join(f"{name}={size}" for name, size in sizes.items())
            raise LaunchError(
                f"{world_size} process{'es' if world_size > 1 else ''} can't be divided into replicas of {replica} "
                f"({product})",
                f"Start a multiple of {replica} processes (launch.nproc).",
            )

    def sizes(self, world_size: int) -> dict[str, int]:
        """The layout that is asked for: each parallel size by its name, and `data_parallel_size`."""
        replica = math.prod(getattr(self, name) for name in REPLICA_SIZES)
        return {**{name: getattr(self, name) for name in PARALLEL_SIZES}, "data_parallel_size": world_size // replica}


REPLICA_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
"""The parallel sizes whose product is the number of ranks that hold a replica of the model."""
PARALLEL_SIZES = (
    "data_parallel_replicate_size",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "virtual_pipeline_parallel_size",
    "context_parallel_size",
    "expert_parallel_size",
    "expert_tensor_parallel_size",
)
"""Every parallel size by its name in a recipe; with `data_parallel_size`, which follows from the world size."""
