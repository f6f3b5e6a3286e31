"""One chunk of the model: the decoder layers of a stage, with the embedding on the first and a head on the last."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor, nn

from engines.batch import TokenOutputs
from engines.models import VocabularyShard, linear_log_probs
from engines_megatron.rows import Rows


class GPTChunk(GPTModel):  # type: ignore[misc]
    """Megatron's GPT without logits: `forward` gives hidden states, `outputs` what the head makes of them."""

    def __init__(
        self, *, model_type: str, vocab_size: int, padded_vocab_size: int, pad_token: int | None, **kwargs: Any
    ) -> None:
        """`vocab_size`: rows of the embedding that are tokens; those behind them only fill up the last ranks.

        `pad_token`: see `Architecture`.
        """
        super().__init__(vocab_size=padded_vocab_size, **kwargs)
        self._vocab_size, self._pad_token = vocab_size, pad_token
        if model_type == "value_model" and self.post_process:
            del self.output_layer
            self.score = nn.Linear(self.config.hidden_size, 1, bias=False, dtype=self.config.params_dtype)

    def _set_attention_backend(self) -> None:
        """Leave the environment alone: Megatron would write there what Transformer Engine takes for granted."""

    def forward(self, rows: Rows) -> Tensor:
        """Hidden states `[rows, 1, H]` of this rank, cut over tensor-parallel ranks under sequence parallelism."""
        hidden: Tensor = super().forward(
            rows.input_ids,
            rows.position_ids,
            attention_mask=None,
            decoder_input=self._embedded(rows) if self.pre_process else None,
            packed_seq_params=rows.packed,
            padding_mask=self._padding_mask(rows),
        )
        return hidden

    def _embedded(self, rows: Rows) -> Tensor:
        """Megatron's embedding, with transformers' gradient: none for reading the padding token.

        In packed rows that is a real token, often the one that ends a turn.
        """
        hidden: Tensor = self.embedding(input_ids=rows.input_ids, position_ids=rows.position_ids)
        if self._pad_token is None:
            return hidden
        is_pad = self._own(rows.input_ids == self._pad_token)
        return torch.where(is_pad.T[..., None], hidden.detach(), hidden)

    def _padding_mask(self, rows: Rows) -> Tensor | None:
        """For routers alone. Megatron cuts it where it embeds the tokens itself, and nowhere else."""
        return None if self.config.num_moe_experts is None else self._own(rows.padding_mask)

    def _own(self, values: Tensor) -> Tensor:
        """This tensor-parallel rank's part of `values` `[1, rows]`: a cut under sequence parallelism, else all."""
        if not self.config.sequence_parallel:
            return values
        return values.chunk(self.pg_collection.tp.size(), dim=1)[self.pg_collection.tp.rank()]

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """The hidden states themselves: logits over a large vocabulary are never made in one piece."""
        return hidden_states

    def outputs(
        self, hidden: Tensor, rows: Rows, needs: frozenset[str], targets_only: bool, equal: bool
    ) -> TokenOutputs:
        """Token outputs in packed order, on every rank of the last stage.

        `needs`: which; `targets_only`: leave 0 where `loss_mask` isn't set; `equal`: every target's log-probability
        counts alike (`Loss.equal_weights`).
        """
        hidden = hidden.squeeze(1)
        if "values" in needs:
            values = self._values(hidden)
            return TokenOutputs(values=rows.gather(values), last_values=rows.last(values))
        if not needs:
            return TokenOutputs()
        log_probs, entropy = self._log_probs(hidden, rows, "entropy" in needs, targets_only, equal)
        return TokenOutputs(log_probs=log_probs, entropy=entropy)

    def _values(self, hidden: Tensor) -> Tensor:
        if self.config.sequence_parallel:
            # every tensor-parallel rank computes all values: each rank's gradient is whole already
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        values: Tensor = self.score(hidden)
        return values[:, 0].float()

    def _log_probs(
        self, hidden: Tensor, rows: Rows, need_entropy: bool, targets_only: bool, equal: bool
    ) -> tuple[Tensor, Tensor | None]:
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden)
        wanted = rows.is_target if targets_only else rows.targets >= 0
        places = wanted.nonzero()[:, 0]
        weight, shard = self._head()
        found = linear_log_probs(
            hidden.index_select(0, places),  # differentiated in a fraction of hidden[places]'s time
            weight,
            rows.targets[places],
            need_entropy=need_entropy,
            equal_weights=equal,
            shard=shard,
        )

        def spread(value: Tensor | None) -> Tensor | None:
            if value is None:
                return None
            return rows.gather(value.new_zeros(len(wanted)).index_put((places,), value))

        log_probs, entropy = spread(found[0]), spread(found[1])
        assert log_probs is not None
        return log_probs, entropy

    def _head(self) -> tuple[Tensor, VocabularyShard | None]:
        """This rank's rows of the head, and which tokens they are."""
        tied = self.share_embeddings_and_output_weights
        weight: Tensor = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        group = parallel_state.get_tensor_model_parallel_group()
        if group.size() == 1:
            return weight, None  # not even sliced: that would copy the gradient
        return weight, VocabularyShard(group, group.rank() * len(weight), self._vocab_size)

    def routers(self) -> list[Any]:
        """This chunk's routers in order of their layers; found by walking the chunk itself."""
        return [layer.mlp.router for layer in self._mixtures()]

    def forget_routes(self) -> None:
        """Drop the probabilities that Megatron's dispatchers keep of a micro-batch, and its graph with them."""
        for layer in self._mixtures():
            layer.mlp.token_dispatcher.probs = None

    def _mixtures(self) -> list[Any]:
        return [layer for layer in self.decoder.layers if hasattr(layer.mlp, "router")]


def frequencies(config: dict[str, Any], head_dim: int) -> tuple[Tensor, float]:
    """Rotary frequencies `[head_dim / 2]` and the factor on cosines and sines, as transformers computes them."""
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    hf = AutoConfig.for_model(**config)
    kind = hf.rope_parameters["rope_type"]
    if kind == "default":
        steps = torch.arange(0, head_dim, 2, dtype=torch.int64).float()
        return 1.0 / (hf.rope_parameters["rope_theta"] ** (steps / head_dim)), 1.0
    inverse, factor = ROPE_INIT_FUNCTIONS[kind](hf, torch.device("cpu"))
    return inverse, factor
