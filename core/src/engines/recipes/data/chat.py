"""Conversations as tokens, with the assistant's turns marked for learning."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

from engines.errors import DataError
from engines.recipes.data.records import Record

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def tokenize_conversation(tokenizer: Any, record: Record) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation, and which of them the assistant wrote.

    Where the template marks what the assistant writes (`{% generation %}`) that is followed. Otherwise each
    turn is found by rendering the conversation up to it and through it: both must be beginnings of the whole.
    Raises `DataError` for a template that changes earlier turns, or that refuses the conversation.
    """
    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:  # none, or several and none of them is the default
        raise record.fault(f"the tokenizer has no chat template to render it with: {error}") from error
    if _GENERATION.search(template):
        return _follow_markers(tokenizer, record)
    text, turns = _find_turns(tokenizer, record)
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return list(encoding["input_ids"]), _mark(encoding["offset_mapping"], turns)


def _follow_markers(tokenizer: Any, record: Record) -> tuple[list[int], list[bool]]:
    how = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    encoding = _apply(tokenizer, record, record.fields["messages"], how)
    mask = [bool(value) for value in encoding["assistant_masks"]]
    if not any(mask) and any(m["content"] for m in record.fields["messages"] if m["role"] == "assistant"):
        raise record.fault("the tokenizer's chat template marks nothing of it as the assistant's ({% generation %})")
    return list(encoding["input_ids"]), mask


def _find_turns(tokenizer: Any, record: Record) -> tuple[str, list[tuple[int, int]]]:
    """The rendered conversation, and where in it, in characters, each assistant turn begins and ends."""
    messages = record.fields["messages"]

    def render(count: int, *, ask: bool) -> str:
        return str(_apply(tokenizer, record, messages[:count], {"tokenize": False, "add_generation_prompt": ask}))

    if messages[0]["role"] == "assistant":
        raise record.fault("message 1 is the assistant's, and answers to nothing; begin with system or user")
    whole = render(len(messages), ask=False)
    turns = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, through = render(index, ask=True), render(index + 1, ask=False)
        if not through.startswith(before) or not whole.startswith(through):
            raise _unstable(record, index + 1)
        if through == before and message["content"]:
            raise record.fault(f"the tokenizer's chat template renders nothing of message {index + 1}")
        turns.append((len(before), _end_of_turn(through, tokenizer.eos_token)))
    return whole, turns


def _apply(tokenizer: Any, record: Record, messages: list[dict[str, str]], how: dict[str, bool]) -> Any:
    """Render with the chat template, which is a program: it may say that it won't, or divide by zero."""
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(messages, **how)
    except Exception as error:
        reason = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
        raise record.fault(f"the tokenizer's chat template refuses this conversation: {reason}") from error


def _end_of_turn(through: str, eos: str | None) -> int:
    """A turn ends with its end token; a newline that the template writes after it is not the assistant's."""
    stripped = through.rstrip()
    return len(stripped) if eos and stripped.endswith(eos) else len(through)


def _mark(offsets: list[tuple[int, int]], turns: list[tuple[int, int]]) -> list[bool]:
    """Tokens that begin inside a turn; one that straddles its beginning could not have been generated."""
    assert all(first[1] <= second[0] for first, second in pairwise(turns))
    return [any(begin <= start < end for begin, end in turns) for start, _ in offsets]


def _unstable(record: Record, turn: int) -> DataError:
    return record.fault(
        f"the tokenizer's chat template renders message {turn} differently when other messages follow (or"
        " writes no such beginning when it asks for an answer), so the assistant's turns can't be found",
        "Mark them in the template with {% generation %} ... {% endgeneration %}, give conversations of one"
        " answer each, or use prompt and response.",
    )
