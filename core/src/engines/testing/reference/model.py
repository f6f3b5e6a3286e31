"""A transformers model as it comes: loaded whole, run one sequence at a time, sent out tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from engines.batch import Batch, TokenOutputs
from engines.checkpoint import open_weights
from engines.errors import ModelError
from engines.models import export_plan, named_weights

CLASSES = {"language_model": AutoModelForCausalLM, "value_model": AutoModelForSequenceClassification}
"""What builds a model of each type; a value model is a sequence classification with one label."""


def load_model(path: str, model_type: str) -> Any:
    """The model at `path`, a folder or a checkpoint, in float32 on the CPU; a value model may get a new head.

    Raises `ModelError` where transformers doesn't build it, or the weights aren't its own; `CheckpointError` for a
    checkpoint that is damaged.
    """
    labels = {"num_labels": 1} if model_type == "value_model" else {}
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False, **labels)
        with torch.device("meta"):
            model_class = type(CLASSES[model_type].from_config(config, trust_remote_code=False))
    except (ValueError, OSError) as cause:
        raise ModelError(f"transformers builds no {model_type} from {path}/config.json: {cause}") from cause
    weights = open_weights(path)
    try:
        model, report = model_class.from_pretrained(
            None,
            config=config,
            state_dict={name: weights.read(name) for name in weights.keys()},  # noqa: SIM118 (it is no mapping)
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    finally:
        weights.close()
    _check_fit(report, path, model_type)
    if weights.is_checkpoint:
        # How to turn back the names that were read; a folder's are others than those of a checkpoint.
        del model._weight_conversions
    return model


def _check_fit(report: dict[str, Any], path: str, model_type: str) -> None:
    """`report`: transformers', of names by what is wrong with them. It only warns."""
    other_head = {"score.weight", "lm_head.weight"} if model_type == "value_model" else set()
    faults = {fault: sorted(map(str, set(names) - other_head)) for fault, names in report.items()}
    if any(faults.values()):
        what = "; ".join(f"{fault}: {', '.join(names)}" for fault, names in faults.items() if names)
        raise ModelError(f"{path}: the weights don't fit the {model_type} of its config.json: {what}")


def token_outputs(model: Any, batch: Batch, needs: frozenset[str]) -> TokenOutputs:
    """What `needs` names, in packed order: each sequence by itself, so that none sees another."""
    of_sequence = _values if hasattr(model, "score") else _log_probs
    found = [of_sequence(model, ids, needs) for ids in batch["input_ids"].split(batch.lengths)]
    return TokenOutputs(**{name: torch.cat([outputs[name] for outputs in found]) for name in found[0]})


def _log_probs(model: Any, ids: Tensor, needs: frozenset[str]) -> dict[str, Tensor]:
    """Of the tokens `ids` `[length]`: position i - 1 predicts token i, and nothing predicts the first."""
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    # the sum of logsumexp is exact to 1e-6; that of log_softmax, on the CPU, loses a digit in a large vocabulary
    log_probs = logits - logits.logsumexp(-1, keepdim=True)
    outputs = {"log_probs": pad(log_probs.gather(1, ids[1:, None])[:, 0], (1, 0))}
    if "entropy" in needs:
        outputs["entropy"] = pad(-(log_probs.exp() * log_probs).sum(-1), (1, 0))
    return outputs


def _values(model: Any, ids: Tensor, needs: frozenset[str]) -> dict[str, Tensor]:
    """What the tokens before each are worth, and what all of them are."""
    hidden = model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
    after = model.score(hidden)[:, 0]
    return {"values": pad(after[:-1], (1, 0)), "last_values": after[-1:]}


@torch.no_grad()
def export_weights(model: Any, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) as `save_pretrained` would write them, floating-point ones as `dtype`; copies, one at a time."""
    weights = dict(named_weights(model))
    for group in export_plan(model):
        yield from group.tensors(
            {
                name: weights[name].detach().to(dtype if weights[name].is_floating_point() else None, copy=True)
                for name in group.names
            }
        )
