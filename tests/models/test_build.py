"""What can be built from a folder, and what is refused with the reason."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.errors import ModelError
from engines.models import build_causal_lm
from engines.testing.tiny import tiny_config


def folder(tmp_path: Path, **config: Any) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_nothing_is_allocated_on_meta(tmp_path: Path) -> None:
    tiny_config("llama").save_pretrained(tmp_path)
    model = build_causal_lm(tmp_path)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.model.config.use_cache is False


def test_the_dtype_of_the_folder_does_not_matter(tmp_path: Path) -> None:
    tiny_config("llama", dtype="bfloat16").save_pretrained(tmp_path)
    assert {p.dtype for p in build_causal_lm(tmp_path).parameters()} == {torch.float32}


SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "no_such_thing"}, "model_type 'no_such_thing', which transformers cannot build"),
        ({}, "model_type None"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}, "holds quantized weights"),
        ({"model_type": "mamba", **SMALL}, r"MambaForCausalLM \(mamba\).*carry one packed sequence into the next"),
        (
            {"model_type": "lfm2", **SMALL, "layer_types": ["conv", "full_attention"], "num_key_value_heads": 2},
            r"Lfm2ForCausalLM.*layers \(conv\)",
        ),
        (
            {"model_type": "llama4_text", **SMALL, "num_local_experts": 2},
            "Llama4ForCausalLM.*attends in chunks|chunked",
        ),
        ({"model_type": "bloom", "hidden_size": 64, "n_layer": 1, "n_head": 4}, "BloomForCausalLM.*be replaced"),
        ({"model_type": "bart", "d_model": 64, "encoder_layers": 1, "decoder_layers": 1}, "BartForCausalLM"),
        ({"model_type": "t5", "d_model": 64, "num_layers": 1}, "no causal language model of type 't5'"),
        ({"model_type": "vit", "num_hidden_layers": 1}, "no causal language model of type 'vit'"),
        (
            {"model_type": "llama", **SMALL, "num_attention_heads": 0},
            r"no model from .*config\.json: ZeroDivisionError",
        ),
        (
            {"model_type": "llama", **SMALL, "hidden_size": "big"},
            "no model from .*'hidden_size' expected int, got str",
        ),
        ({"model_type": "llama", **SMALL, "hidden_act": "sillu"}, "no model from .*KeyError: 'sillu'"),
    ],
)
def test_refused(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        build_causal_lm(folder(tmp_path, **config))
    assert caught.value.remedy


def test_code_in_the_folder_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "modeling_mine.py").write_text("raise SystemExit('this ran')")
    with pytest.raises(ModelError, match="mine"):
        build_causal_lm(
            folder(
                tmp_path,
                model_type="mine",
                auto_map={"AutoConfig": "modeling_mine.C", "AutoModelForCausalLM": "modeling_mine.M"},
            )
        )


def test_importing_the_room_does_not_import_transformers() -> None:
    code = "import engines.models, sys; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
