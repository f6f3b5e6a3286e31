"""What config.json holds for each family of decoders that is built; imports no torch.

Keys and defaults are those of transformers' configuration classes. Sizes are required even where transformers has a
default: a file without them was not written by `save_pretrained`, and a guess would build another model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from engines.config import Positive

PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Decoder(BaseModel):
    """A decoder of the llama kind: RMSNorm, rotary positions, SwiGLU, grouped queries."""

    model_config = ConfigDict(strict=True, frozen=True)

    qkv_bias: ClassVar[bool] = False
    """Whether the projections to queries, keys and values, and no others, have biases."""
    qk_norm: ClassVar[bool] = False
    """Whether each head's queries and keys are normalised."""

    num_hidden_layers: Positive
    hidden_size: Positive
    intermediate_size: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive | None
    head_dim: Positive | None = None
    vocab_size: Positive
    max_position_embeddings: Positive
    rms_norm_eps: PositiveFloat
    tie_word_embeddings: bool = False
    initializer_range: PositiveFloat = 0.02
    pad_token_id: int | None = None

    @property
    def pad_token(self) -> int | None:
        """A token whose embedding gets no gradient from where it is read; torch counts negative ones from the end."""
        return None if self.pad_token_id is None else self.pad_token_id % self.vocab_size

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values; each serves as many query heads."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """Width of a head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def contradictions(self) -> Iterator[str]:
        """What can't be, a line each, though every key for itself may."""
        heads = self.num_attention_heads
        if heads % self.kv_heads:
            yield f"num_key_value_heads: {self.kv_heads} doesn't divide num_attention_heads: {heads}"
        if self.head_dim is None and self.hidden_size % heads:
            yield f"num_attention_heads: {heads} doesn't divide hidden_size: {self.hidden_size}; head_dim is missing"
        elif self.head_size % 2:
            yield f"head_dim: {self.head_size} is odd, and rotary positions turn pairs"
        if self.pad_token_id is not None and not -self.vocab_size <= self.pad_token_id < self.vocab_size:
            yield f"pad_token_id: {self.pad_token_id} is none of the {self.vocab_size} tokens of vocab_size"


class Llama(Decoder):
    """`model_type` llama."""

    num_key_value_heads: Positive | None = None


class Qwen2(Decoder):
    """`model_type` qwen2."""

    qkv_bias = True


class Qwen3(Decoder):
    """`model_type` qwen3; transformers takes head_dim for 128 where it is missing, whatever the other sizes."""

    qk_norm = True
    head_dim: Positive


class Mixture(Decoder):
    """A decoder with layers that are mixtures of experts."""

    num_key_value_heads: Positive
    number: Positive = Field(validation_alias=AliasChoices("num_local_experts", "num_experts"))
    num_experts_per_tok: Positive

    @property
    def expert_size(self) -> int:
        """Width of an expert."""
        return self.intermediate_size

    @property
    def normalized(self) -> bool:
        """Whether the weights of a token's experts are scaled to sum to 1."""
        return True

    def is_mixture(self, layer: int) -> bool:
        """Whether a layer, from 0, is a mixture; else it is dense."""
        return True

    def contradictions(self) -> Iterator[str]:
        """Also more experts of a token than there are."""
        yield from super().contradictions()
        if self.num_experts_per_tok > self.number:
            yield f"num_experts_per_tok: {self.num_experts_per_tok} is more than the {self.number} experts"


class Mixtral(Mixture):
    """`model_type` mixtral."""


class Qwen3Moe(Mixture):
    """`model_type` qwen3_moe."""

    qk_norm = True
    moe_intermediate_size: Positive
    norm_topk_prob: bool = False
    decoder_sparse_step: Positive = 1
    mlp_only_layers: list[int] | None = None

    @property
    def expert_size(self) -> int:
        """Width of an expert; that of a dense layer is another."""
        return self.moe_intermediate_size

    @property
    def normalized(self) -> bool:
        """As the file says."""
        return self.norm_topk_prob

    def is_mixture(self, layer: int) -> bool:
        """Every `decoder_sparse_step`-th layer that isn't one of `mlp_only_layers`."""
        return layer not in (self.mlp_only_layers or ()) and (layer + 1) % self.decoder_sparse_step == 0


FAMILIES: dict[str, type[Decoder]] = {
    "llama": Llama,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "qwen3_moe": Qwen3Moe,
    "mixtral": Mixtral,
}
"""By `model_type`."""
