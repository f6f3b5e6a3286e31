"""What a config.json of a family that is built may ask for, and Megatron-Core does not do here; imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from engines_megatron.families import FAMILIES

ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
"""Kinds of rotary positions that are built, and the numbers that each needs."""


@dataclass(frozen=True)
class _Only:
    """A key that families know, and the values of it that are built; a missing key and null are."""

    key: str
    values: tuple[Any, ...]
    why: str
    families: tuple[str, ...] = tuple(FAMILIES)


_ONLY = (
    _Only("hidden_act", ("silu",), "silu alone is built"),
    _Only("attention_dropout", (0,), "dropout is not built, use 0"),
    _Only(
        "attention_bias",
        (False,),
        "Megatron has biases on queries, keys and values, but not on the output projection beside them",
        ("llama", "qwen3", "qwen3_moe"),
    ),
    _Only("mlp_bias", (False,), "Megatron has biases on all linear layers or on none", ("llama",)),
    _Only("router_jitter_noise", (0,), "noise on the router's input is not built, use 0", ("mixtral",)),
    _Only("shared_expert_intermediate_size", (0,), "shared experts are not built"),
    _Only("n_shared_experts", (0,), "shared experts are not built"),
    _Only("num_shared_experts", (0,), "shared experts are not built"),
    _Only("quantization_config", (), "quantized weights can't be trained, use the unquantized model"),
)


def unbuilt(config: Mapping[str, Any]) -> Iterator[str]:
    """A line for each setting of a config.json of a known `model_type` that is not built."""
    for rule in _ONLY:
        value = config.get(rule.key)
        if config["model_type"] in rule.families and value is not None and value not in rule.values:
            yield f"{rule.key}: {value!r}: {rule.why}"
    if config.get("num_experts_per_tok") == 1 and config.get("norm_topk_prob", config["model_type"] == "mixtral"):
        yield "num_experts_per_tok: 1 with a weight scaled to 1: Megatron refuses it, the router learns nothing"
    yield from _windows(config)
    yield from _rotary_positions(config)


def _windows(config: Mapping[str, Any]) -> Iterator[str]:
    """Layers that attend to a window; each family has its own way to say which."""
    kind = config["model_type"]
    if kind == "llama":
        return
    types = config.get("layer_types")
    others = sorted({str(one) for one in types or ()} - {"full_attention"})
    if others:
        yield f"layer_types: {', '.join(others)}: full_attention alone is built"
    elif _window(config) is not None and (kind in ("mixtral", "qwen3_moe") or (types is None and _reaches(config))):
        switch = "" if kind == "mixtral" else " with use_sliding_window"
        yield f"sliding_window: {_window(config)}{switch}: attention to whole sequences alone is built"


def _window(config: Mapping[str, Any]) -> Any:
    if config["model_type"] == "mixtral":
        return config.get("sliding_window")
    return config.get("sliding_window", 4096) if config.get("use_sliding_window") else None


def _reaches(config: Mapping[str, Any]) -> bool:
    """Whether any layer is beyond the first `max_window_layers`, which attend to everything."""
    first, layers = config.get("max_window_layers", 28), config.get("num_hidden_layers")
    return not (isinstance(first, int) and isinstance(layers, int) and first >= layers)


def _rotary_positions(config: Mapping[str, Any]) -> Iterator[str]:
    """`rope_parameters` of transformers 5, or `rope_scaling` of earlier ones, which transformers prefers."""
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    settings = config.get(key) or {}
    if not isinstance(settings, Mapping):
        yield f"{key}: {settings!r}: must be an object"
        return
    part = settings.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if part not in (None, 1):
        yield f"partial_rotary_factor: {part!r}: positions on whole heads alone are built"
    if any(isinstance(value, Mapping) for value in settings.values()):
        yield f"{key}: differs by layer ({', '.join(map(str, settings))}): one for all layers alone is built"
        return
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in ROPE_KEYS:
        yield f"{key}.rope_type: {kind!r}: {', '.join(ROPE_KEYS)} alone are built"
        return
    for name in ROPE_KEYS[kind]:
        if type(settings.get(name)) not in (int, float) or settings[name] <= 0:
            yield f"{key}.{name}: {settings.get(name)!r}: rope_type {kind} needs a positive number"
