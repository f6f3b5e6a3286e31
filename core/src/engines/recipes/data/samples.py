"""All samples of a file, tokenised and held as flat arrays."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engines.errors import DataError
from engines.recipes.data.records import Kind, Record, read_records
from engines.recipes.data.tokenizing import Tokenize, Tokens, given_tokens


@dataclass(frozen=True)
class Limits:
    """What a sample must keep to; each names the recipe's key in messages."""

    vocab_size: int
    max_length: int | None = None
    truncate: bool = False
    """Cut samples to `max_length` instead of refusing them."""
    max_tokens_per_micro_batch: int | None = None

    def apply(self, tokens: Tokens, record: Record) -> Tokens:
        """The sample, truncated if so configured. Raises `DataError` if it is too long, empty or out of range."""
        ids, mask = tokens
        if not ids:
            raise record.fault("the sample has no tokens")
        if self.max_length is not None and len(ids) > self.max_length:
            if not self.truncate:
                raise record.fault(
                    f"the sample has {len(ids)} tokens, more than data.max_length: {self.max_length}",
                    "Raise data.max_length, or cut samples with data.overlong=truncate.",
                )
            ids, mask = ids[: self.max_length], mask[: self.max_length]
        budget = self.max_tokens_per_micro_batch
        if budget is not None and len(ids) > budget:
            raise record.fault(
                f"the sample has {len(ids)} tokens, more than engine.max_tokens_per_micro_batch: {budget}",
                f"Raise it, or cut samples with data.max_length={budget} data.overlong=truncate.",
            )
        if not 0 <= min(ids) <= max(ids) < self.vocab_size:
            index = next(index for index, value in enumerate(ids) if not 0 <= value < self.vocab_size)
            raise record.fault(
                f"input_ids[{index}] is {ids[index]}, outside the model's vocabulary of {self.vocab_size}"
            )
        return ids, mask


@dataclass(frozen=True)
class Samples:
    """Samples packed one after another: `ids` int32 and `mask` bool `[tokens]`, `bounds` int64 `[n + 1]`."""

    ids: np.ndarray
    mask: np.ndarray
    bounds: np.ndarray
    places: list[str]
    """Where each sample stands: file and line."""

    def __len__(self) -> int:
        return len(self.places)

    def row(self, index: int) -> dict[str, np.ndarray]:
        """A sample's fields, as `Batch.from_sequences` takes them: `input_ids` int64, `loss_mask` bool."""
        part = slice(self.bounds[index], self.bounds[index + 1])
        return {"input_ids": self.ids[part].astype(np.int64), "loss_mask": self.mask[part].copy()}

    def fingerprint(self) -> str:
        """Hash of all tokens, masks and boundaries: equal exactly if the samples are."""
        import xxhash

        digest = xxhash.xxh3_128()
        for part in (self.ids, self.mask, self.bounds):
            digest.update(part.data)
        return digest.hexdigest()


@dataclass(frozen=True)
class Summary:
    """What a scan found."""

    num_samples: int
    kinds: frozenset[Kind]

    @property
    def needs_tokenizer(self) -> bool:
        """Whether any record is text of some kind."""
        return bool(self.kinds - {"input_ids"})


def scan(path: Path, limits: Limits) -> Summary:
    """Check a file as far as possible without a tokenizer, reading all of it. Raises `DataError`."""
    count, kinds = 0, set()
    for record, kind in read_records(path):
        if kind == "input_ids":
            limits.apply(given_tokens(record, kind), record)
        kinds.add(kind)
        count += 1
    return Summary(count, frozenset(kinds))


def read_samples(path: Path, limits: Limits, tokenize: Tokenize = given_tokens) -> Samples:
    """All samples of a file in file order.

    Raises `DataError` for the first one that can't be used, and if no token of them all is a target.
    """
    ids, mask, bounds, places = array("i"), bytearray(), array("q", [0]), []
    for record, (sample_ids, sample_mask) in _tokens(path, limits, tokenize):
        ids.extend(sample_ids)
        mask.extend(sample_mask)
        bounds.append(len(ids))
        places.append(record.place)
    flat: Any = np.frombuffer(bytes(mask), dtype=np.bool_)
    samples = Samples(np.array(ids, dtype=np.int32), flat, np.array(bounds, dtype=np.int64), places)
    if np.count_nonzero(flat) == np.count_nonzero(flat[samples.bounds[:-1]]):  # a sample's first token is no target
        raise DataError(f"{path} has nothing to learn from: no token of its {len(places)} samples is a target")
    return samples


def _tokens(path: Path, limits: Limits, tokenize: Tokenize) -> Iterator[tuple[Record, Tokens]]:
    for record, kind in read_records(path):
        yield record, limits.apply(tokenize(record, kind), record)
