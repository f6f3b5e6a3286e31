"""Records to tokens: one sample's ids and which of them are learned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines.errors import ModelError
from engines.recipes.data.chat import tokenize_conversation
from engines.recipes.data.records import Kind, Record

Tokens = tuple[list[int], list[bool]]
Tokenize = Callable[[Record, Kind], Tokens]


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder. Raises `ModelError` if transformers can't load it."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of whatever kind: the library for fast tokenizers raises Exception itself
        raise ModelError(f"{folder}: the tokenizer can't be loaded: {type(error).__name__}: {error}") from error


def tokenize_with(tokenizer: Any) -> Tokenize:
    """The function that turns records of every kind into tokens."""

    def tokenize(record: Record, kind: Kind) -> Tokens:
        fields = record.fields
        match kind:
            case "input_ids":
                return given_tokens(record, kind)
            case "messages":
                return tokenize_conversation(tokenizer, record)
            case "text":
                ids = _ending(tokenizer, tokenizer(fields["text"])["input_ids"])
                return ids, [True] * len(ids)
            case "prompt_response":
                prompt = _opening(tokenizer, tokenizer(fields["prompt"])["input_ids"])
                answer = tokenizer(fields["response"], add_special_tokens=False)["input_ids"]
                answer = _ending(tokenizer, answer)
                return prompt + answer, [False] * len(prompt) + [True] * len(answer)

    return tokenize


def tokenize_with_folder(folder: Path) -> Tokenize:
    """`tokenize_with` the tokenizer of a model folder, loaded when the first record that needs one comes."""
    loaded: list[Tokenize] = []

    def tokenize(record: Record, kind: Kind) -> Tokens:
        if kind == "input_ids":
            return given_tokens(record, kind)
        if not loaded:
            loaded.append(tokenize_with(load_tokenizer(folder)))
        return loaded[0](record, kind)

    return tokenize


def given_tokens(record: Record, kind: Kind) -> Tokens:
    """The tokens of a record that brings its own."""
    assert kind == "input_ids", f"{kind} needs a tokenizer"
    ids = list(record.fields["input_ids"])
    return ids, [bool(value) for value in record.fields.get("loss_mask", [1] * len(ids))]


def _ending(tokenizer: Any, ids: list[int]) -> list[int]:
    """`ids` with the end-of-sequence token behind them, once, if the tokenizer has one."""
    eos = tokenizer.eos_token_id
    return list(ids) if eos is None or list(ids[-1:]) == [eos] else [*ids, eos]


def _opening(tokenizer: Any, ids: list[int]) -> list[int]:
    """`ids` without the end that some tokenizers put behind every text: a prompt goes on."""
    return list(ids[:-1]) if ids and ids[-1] == tokenizer.eos_token_id else list(ids)
