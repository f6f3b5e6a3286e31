"""`Batch`: packed sequences, and `TokenOutputs`: what a model says about them.

Padding exists only at the edges (`from_padded`, `to_padded`); everything between is packed, so no token is
computed in vain and no length is special.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from engines.errors import BatchError

OUTPUTS_OF: Mapping[str, frozenset[str]] = {
    "language_model": frozenset({"log_probs", "entropy"}),
    "value_model": frozenset({"values"}),
}
"""Per-token outputs that each type of model gives."""
OUTPUTS = frozenset().union(*OUTPUTS_OF.values())
"""Those that a loss or a caller may ask for, in api 1. `values` brings `last_values` with it."""


@dataclass(frozen=True)
class Batch:
    """Sequences packed one after another.

    `tokens`: per-token fields, each `[total_tokens, ...]`; `input_ids` (int64) is always there, `loss_mask`
    (bool) marks targets. `sequences`: per-sequence fields, each `[n, ...]`. `cu_seqlens`: int64 `[n + 1]`, the
    boundaries. `meta`: plain data that travels along. A sequence's first token can't be predicted, so its
    `loss_mask` is forced to False.
    """

    cu_seqlens: Tensor
    tokens: Mapping[str, Tensor]
    sequences: Mapping[str, Tensor] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)
    is_filler: bool = False

    def __post_init__(self) -> None:
        if "input_ids" not in self.tokens:
            raise BatchError(f"a batch needs the per-token field input_ids; it has {sorted(self.tokens)}")
        cu = self.cu_seqlens
        if cu.dtype != torch.int64 or cu.dim() != 1 or len(cu) == 0 or int(cu[0]) != 0:
            raise BatchError(f"cu_seqlens must be int64 [n + 1] beginning with 0, got {cu.dtype} {tuple(cu.shape)}")
        if len(cu) > 1 and int((cu[1:] - cu[:-1]).min()) < 1:
            raise BatchError("every sequence of a batch needs at least one token")
        total, n = int(cu[-1]), len(cu) - 1
        for kind, group, size in (("per-token", self.tokens, total), ("per-sequence", self.sequences, n)):
            for name, value in group.items():
                if value.dim() == 0 or len(value) != size:
                    raise BatchError(f"{kind} field {name} has shape {tuple(value.shape)}, expected [{size}, ...]")
        shared = sorted(set(self.tokens) & set(self.sequences))
        if shared:
            raise BatchError(f"fields {shared} are both per-token and per-sequence")
        if "loss_mask" in self.tokens:
            mask = self.tokens["loss_mask"].bool().clone()
            mask[cu[:-1].to(mask.device)] = False
            object.__setattr__(self, "tokens", {**self.tokens, "loss_mask": mask})

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.cu_seqlens) - 1

    def __getitem__(self, name: str) -> Tensor:
        """A field by name, per-token or per-sequence."""
        for group in (self.tokens, self.sequences):
            if name in group:
                return group[name]
        raise BatchError(f"the batch has no field {name}; it has {sorted([*self.tokens, *self.sequences])}")

    def __contains__(self, name: str) -> bool:
        return name in self.tokens or name in self.sequences

    @property
    def num_tokens(self) -> int:
        """Tokens over all sequences."""
        return int(self.cu_seqlens[-1])

    @property
    def lengths(self) -> list[int]:
        """Tokens per sequence."""
        return (self.cu_seqlens[1:] - self.cu_seqlens[:-1]).tolist()

    @property
    def groups(self) -> list[int] | None:
        """The per-sequence field `group`, if there: sequences with equal numbers share a rank and a micro-batch.

        For losses over pairs or over all answers to one prompt.
        """
        return self.sequences["group"].tolist() if "group" in self.sequences else None

    @property
    def position_ids(self) -> Tensor:
        """int64 `[total_tokens]`: each token's place in its own sequence."""
        starts = torch.repeat_interleave(self.cu_seqlens[:-1], self.cu_seqlens[1:] - self.cu_seqlens[:-1])
        return (torch.arange(self.num_tokens, device=starts.device) - starts).to(self.tokens["input_ids"].device)

    @classmethod
    def from_sequences(
        cls, rows: Sequence[Mapping[str, Any]], *, sequences: Mapping[str, Tensor] | None = None
    ) -> Batch:
        """Pack `rows`, each a mapping from per-token field to a list or tensor of that sequence's length."""
        if not rows:
            return cls.empty()
        for index, row in enumerate(rows):
            if not isinstance(row, Mapping) or "input_ids" not in row:
                raise BatchError(
                    f"sequence {index} is {type(row).__name__}; it must be a mapping of per-token fields, input_ids "
                    "among them",
                    'for instance {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}',
                )
        names = set(rows[0])
        for index, row in enumerate(rows):
            if set(row) != names:
                raise BatchError(f"sequence {index} has fields {sorted(row)}, sequence 0 has {sorted(names)}")
            sizes = {name: len(value) for name, value in row.items()}
            if len(set(sizes.values())) > 1:
                raise BatchError(f"sequence {index} has fields of different lengths: {sizes}")
        packed = {name: torch.cat([torch.as_tensor(row[name]) for row in rows]) for name in rows[0]}
        return cls(_boundaries(len(row["input_ids"]) for row in rows), packed, sequences or {})

    @classmethod
    def from_padded(cls, tokens: Mapping[str, Tensor], attention_mask: Tensor, **kwargs: Any) -> Batch:
        """Pack `[n, width, ...]` fields, keeping what `attention_mask` `[n, width]` marks, on either side."""
        keep = attention_mask.bool()
        return cls(_boundaries(keep.sum(1).tolist()), {name: value[keep] for name, value in tokens.items()}, **kwargs)

    def to_padded(self, value: Tensor | str, *, padding: float = 0) -> Tensor:
        """A per-token field or tensor `[total_tokens, ...]` as `[n, longest, ...]`, padded on the right."""
        value = self[value] if isinstance(value, str) else value
        parts = value.split(self.lengths)
        return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True, padding_value=padding)

    @classmethod
    def empty(cls) -> Batch:
        """No sequence at all: what a rank gets when there are fewer samples than ranks."""
        ids = torch.zeros(0, dtype=torch.int64)
        return cls(torch.zeros(1, dtype=torch.int64), {"input_ids": ids, "loss_mask": ids.bool()})

    @classmethod
    def filler(cls, like: Batch) -> Batch:
        """One masked token with the fields of `like`; takes part in collectives and in no statistic."""
        tokens = {name: value.new_zeros((1, *value.shape[1:])) for name, value in like.tokens.items()}
        tokens.setdefault("loss_mask", torch.zeros(1, dtype=torch.bool, device=tokens["input_ids"].device))
        sequences = {name: value.new_zeros((1, *value.shape[1:])) for name, value in like.sequences.items()}
        return cls(torch.tensor([0, 1]), tokens, sequences, is_filler=True)

    def select(self, indices: Sequence[int]) -> Batch:
        """The sequences at `indices`, in that order."""
        cu = self.cu_seqlens.tolist()
        bounds = [(cu[i], cu[i + 1]) for i in indices]

        def gather(value: Tensor) -> Tensor:
            return torch.cat([value[a:b] for a, b in bounds]) if bounds else value[:0]

        index = torch.tensor(list(indices), dtype=torch.int64)
        return replace(
            self,
            cu_seqlens=_boundaries(b - a for a, b in bounds),
            tokens={name: gather(value) for name, value in self.tokens.items()},
            sequences={name: value[index.to(value.device)] for name, value in self.sequences.items()},
        )

    def with_tokens(self, **tokens: Tensor) -> Batch:
        """A copy with more, or other, per-token fields (old log-probs, advantages, ...)."""
        return replace(self, tokens={**self.tokens, **tokens})

    def with_sequences(self, **sequences: Tensor) -> Batch:
        """A copy with more, or other, per-sequence fields."""
        return replace(self, sequences={**self.sequences, **sequences})

    def to(self, device: torch.device | str) -> Batch:
        """A copy on `device`; the boundaries stay on the CPU, where they are read."""
        return replace(
            self,
            tokens={name: value.to(device) for name, value in self.tokens.items()},
            sequences={name: value.to(device) for name, value in self.sequences.items()},
        )


@dataclass(frozen=True)
class TokenOutputs:
    """Per-token outputs in packed order, target-aligned.

    `log_probs[i]` = log p(input_ids[i] | earlier tokens of its sequence); `entropy[i]` and `values[i]` come from
    the same hidden state, that of token i - 1. A sequence's first token has 0. float32 `[total_tokens]`.
    `last_values` `[n]`: the value after each sequence's last token.
    """

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    last_values: Tensor | None = None

    def present(self) -> dict[str, Tensor]:
        """The outputs that are there, by name."""
        pairs = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {name: value for name, value in pairs if value is not None}

    def map(self, function: Any) -> TokenOutputs:
        """Apply `function` to every output that is there."""
        return TokenOutputs(**{name: function(value) for name, value in self.present().items()})

    def keep(self, names: Iterable[str]) -> TokenOutputs:
        """Only the named outputs, detached from their graph."""
        wanted = set(names) | ({"last_values"} if "values" in names else set())
        return TokenOutputs(**{name: value.detach() for name, value in self.present().items() if name in wanted})


def _boundaries(lengths: Iterable[int]) -> Tensor:
    return torch.nn.functional.pad(torch.tensor(list(lengths), dtype=torch.int64).cumsum(0), (1, 0))
