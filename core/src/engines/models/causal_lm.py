"""A Hugging Face causal language model that runs packed batches and answers with token outputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from engines.batch import Batch, TokenOutputs
from engines.errors import ModelError
from engines.models.attention import Packing
from engines.models.buffers import rebuild_buffers
from engines.models.export import named_weights
from engines.models.token_outputs import linear_log_probs

PROVIDES = frozenset({"log_probs", "entropy"})
"""Outputs that a language model's head can give."""


class PackedCausalLM(nn.Module):
    """The model of an engine; made by `build_causal_lm`, meant to be the root module of `fully_shard`.

    The head's weight is read inside `forward`, as a plain tensor, so the group of the root must hold it (with
    tied weights it is the embedding). Life cycle: build on "meta", shard, `materialize`, load the weights that
    `named_weights` names, `check`, then `forward`.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        """transformers' model; names of weights are its names."""
        head = model.get_output_embeddings()
        if type(head) is not nn.Linear:
            raise ModelError(f"{type(model).__name__}'s head is {type(head).__name__}, not a linear layer")
        text = model.config.get_text_config()
        self._softcap: float | None = getattr(text, "final_logit_softcapping", None)
        self._scale: float | None = _logit_scale(text)
        self._layers_name = _find_layers(model)

    def layers(self) -> list[nn.Module]:
        """The decoder layers in their order: the units of sharding and of recomputation."""
        return list(self.model.get_submodule(self._layers_name))

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Those of transformers' model, by its names."""
        return named_weights(self.model)

    def enable_activation_checkpointing(self) -> None:
        """Recompute each layer in the backward pass of training. Raises `ModelError` if the model can't."""
        if not self.model.supports_gradient_checkpointing:
            raise ModelError(f"{type(self.model).__name__} does not support activation checkpointing")
        self.model.activation_checkpointing_enable({"use_reentrant": False})

    def materialize(self, device: torch.device | str) -> None:
        """Allocate what was built on "meta" on `device`: parameters empty, buffers computed, ties kept.

        Every rank, after sharding and before loading. Raises `ModelError` for a buffer that only the model's
        constructor can fill.
        """
        self.to_empty(device=device)
        self.model.tie_weights()
        rebuild_buffers(self.model)

    def forward(
        self, batch: Batch, needs: frozenset[str], targets_only: bool = False, equal_weights: bool = False
    ) -> TokenOutputs:
        """Outputs of a packed micro-batch on the model's device, target-aligned, float32 `[total_tokens]`.

        `needs`: the outputs to compute, of `PROVIDES`. `targets_only`: compute them where `loss_mask` is set and
        leave 0 elsewhere, for losses that read nothing else; the head then works on fewer rows.
        `equal_weights`: see `linear_log_probs`.
        """
        assert needs <= PROVIDES, f"{sorted(needs - PROVIDES)} asked of a language model"
        ids, positions = batch["input_ids"], batch.position_ids
        hidden = self._hidden(ids, positions, Packing.of(batch.lengths))
        predicted = (batch["loss_mask"] if targets_only else positions > 0).nonzero()[:, 0]
        head = self.model.get_output_embeddings()
        log_probs, entropy = linear_log_probs(
            hidden.index_select(0, predicted - 1).to(head.weight.dtype),
            head.weight,
            ids[predicted],
            head.bias,
            need_entropy="entropy" in needs,
            softcap=self._softcap,
            scale=self._scale,
            equal_weights=equal_weights,
        )

        def spread(values: Tensor | None) -> Tensor | None:
            if values is None:
                return None
            return values.new_zeros(len(ids)).index_put((predicted,), values)

        return TokenOutputs(log_probs=spread(log_probs) if "log_probs" in needs else None, entropy=spread(entropy))

    def _hidden(self, ids: Tensor, positions: Tensor, packing: Packing) -> Tensor:
        """Hidden states after the last norm, `[total_tokens, H]`."""
        out = self.model.base_model(
            input_ids=ids[None], position_ids=positions[None], use_cache=False, packing=packing
        )
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    @torch.no_grad()
    def check(self) -> None:
        """Compare packed outputs with transformers' own logits, sequence by sequence, on a dozen tokens.

        Catches heads that do more than this class knows, and layers through which packed sequences see each
        other. Every rank, once, after loading; under `fully_shard` register it first with
        `register_fsdp_forward_method(model, "check")`. Raises `ModelError` naming the architecture.
        """
        weight = self.model.get_output_embeddings().weight
        vocabulary, training = weight.shape[0], self.training
        rows = [[(7 * i + 3) % vocabulary for i in range(n)] for n in (5, 1, 5, 3)]
        batch = Batch.from_sequences([{"input_ids": row} for row in rows]).to(weight.device)
        self.eval()
        ours = self.forward(batch, frozenset({"log_probs"})).log_probs
        theirs = torch.cat([self._plain_log_probs(ids) for ids in batch["input_ids"].split(batch.lengths)])
        self.train(training)
        assert ours is not None
        if not theirs.isfinite().all():
            raise ModelError(
                "the model's own log-probabilities are not finite: its weights hold NaN or infinity, or overflow",
                "Load other weights (model.path).",
            )
        # the mean, since in low precision a single token may go to another expert
        difference = (ours - theirs).abs().mean().item()
        if not difference <= (1e-3 if weight.dtype == torch.float32 else 0.25):
            raise ModelError(
                f"{type(self.model).__name__} ({self.model.config.model_type}) cannot be trained here: packed, it "
                f"gives log-probabilities that differ by {difference:.3g} on average from those of the plain model",
                "Its head, or a layer that mixes tokens, does something that packed sequences do not allow.",
            )

    def _plain_log_probs(self, ids: Tensor) -> Tensor:
        ours = self.model.config._attn_implementation
        self.model.set_attn_implementation("eager")
        try:
            logits = self.model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
        finally:
            self.model.set_attn_implementation(ours)
        log_probs = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        return nn.functional.pad(log_probs, (1, 0))


def _logit_scale(config: Any) -> float | None:
    if getattr(config, "logit_scale", None) is not None:  # Cohere
        return float(config.logit_scale)
    if getattr(config, "logits_scaling", None) is not None:  # Granite
        return 1.0 / float(config.logits_scaling)
    return None


def _find_layers(model: Any) -> str:
    """Name of the list of decoder layers: the longest `ModuleList` of classes that must not be split."""
    kinds = set(model._no_split_modules or ())
    lists: list[tuple[int, str]] = [
        (len(module), name)
        for name, module in model.base_model.named_modules(prefix=model.base_model_prefix)
        if isinstance(module, nn.ModuleList)
        and len(module) > 0
        and all(type(layer).__name__ in kinds for layer in module)
    ]
    if not lists:
        raise ModelError(f"{type(model).__name__} has no list of decoder layers of class {sorted(kinds)}")
    return max(lists)[1]
