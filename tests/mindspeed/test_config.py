"""Each setting reaches MindSpeed by its own name, or is refused."""

from __future__ import annotations

from typing import Any

import pytest

from engines.configuring import validate
from engines.errors import ConfigError
from engines_megatron.config import MegatronConfig
from engines_mindspeed.config import MindSpeedConfig

DEFAULTS = {
    "use_flash_attn": True,
    "attention_mask_type": "causal",
    "sparse_mode": 2,
    "context_parallel_size": 1,
    "context_parallel_algo": "megatron_cp_algo",
}


def arguments(**settings: Any) -> dict[str, Any]:
    return validate(MindSpeedConfig, {"strategy": "megatron", **settings}, where="engine").arguments()


def test_every_field_has_a_row() -> None:
    rows = {"flash_attention", "context_parallel_algorithm", "mindspeed"}
    assert MindSpeedConfig.model_fields.keys() - MegatronConfig.model_fields.keys() == rows


@pytest.mark.parametrize(
    ("settings", "changed"),
    [
        ({}, {}),
        ({"flash_attention": False}, {"use_flash_attn": False, "sparse_mode": 0}),
        ({"context_parallel_size": 2}, {"context_parallel_size": 2}),
        (
            {"mindspeed": {"pre_tockens": 1024, "reset_attention_mask": True}},
            {"pre_tockens": 1024, "reset_attention_mask": True},
        ),
    ],
)
def test_what_mindspeed_is_given(settings: dict[str, Any], changed: dict[str, Any]) -> None:
    assert arguments(**settings) == DEFAULTS | changed


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"context_parallel_algorithm": "ulysses_cp_algo"}, "ulysses_cp_algo expects sequences cut in another way"),
        ({"context_parallel_algorithm": "hybrid_cp_algo"}, "hybrid_cp_algo expects sequences cut in another way"),
        ({"context_parallel_algorithm": "ring"}, "context_parallel_algorithm"),
        ({"mindspeed": {"use_flash_attn": False}}, "use_flash_attn follows from flash_attention"),
        ({"mindspeed": {"context_parallel_size": 4}}, "context_parallel_size follows from context_parallel_size"),
        ({"mindspeed": {"tensor_model_parallel_size": 4}}, "follows from tensor_parallel_size"),
        ({"mindspeed": {"pre_tockens": [1]}}, "pre_tockens"),
        ({"flash_attention": 1.5}, "flash_attention"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        arguments(**settings)
