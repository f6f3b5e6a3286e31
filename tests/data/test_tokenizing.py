"""What of a record is learned: assistant turns, responses, whole texts; never a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engines.errors import DataError, ModelError
from engines.recipes.data.records import Record, check_form
from engines.recipes.data.tokenizing import load_tokenizer, tokenize_with
from support.tokenizer import CHATML, DEFAULT_SYSTEM, FORGETFUL, INSTRUCT, MARKED, tiny_tokenizer

CHAT = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "Four.\n"},
    {"role": "user", "content": "assistant"},
    {"role": "assistant", "content": " No"},
]
SYSTEM = [{"role": "system", "content": "Be brief."}]


def learned(tokenizer: Any, fields: dict[str, Any]) -> tuple[str, str]:
    """The whole sample and the learned part of it as text; parts apart by |."""
    record = Record("data.jsonl, line 1", fields)
    ids, mask = tokenize_with(tokenizer)(record, check_form(record))
    runs, previous = [], False
    for token, is_target in zip(ids, mask, strict=True):
        if is_target:
            runs = [*runs, []] if not previous else runs
            runs[-1].append(token)
        previous = is_target
    return tokenizer.decode(ids), "|".join(tokenizer.decode(run) for run in runs)


@pytest.mark.parametrize("template", [CHATML, DEFAULT_SYSTEM, MARKED], ids=["chatml", "default system", "marked"])
def test_the_assistants_turns_are_learned_with_their_end(template: str, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path, template=template)
    for messages in (CHAT, SYSTEM + CHAT):
        text, targets = learned(tokenizer, {"messages": messages})
        assert text == tokenizer.apply_chat_template(messages, tokenize=False)
        assert targets == "Four.\n<|im_end|>| No<|im_end|>"


def test_the_tokens_are_those_of_the_template(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path, template=DEFAULT_SYSTEM)
    record = Record("data.jsonl, line 1", {"messages": CHAT})
    ids, mask = tokenize_with(tokenizer)(record, "messages")
    assert ids == tokenizer.apply_chat_template(CHAT, tokenize=True)["input_ids"]
    assert len(mask) == len(ids)
    assert mask.index(True) == len(tokenizer.apply_chat_template(CHAT[:1], add_generation_prompt=True)["input_ids"])


def test_a_template_without_generation_prompt(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path, template=INSTRUCT, eos="<|endoftext|>")
    text, targets = learned(tokenizer, {"messages": CHAT})
    assert text.startswith("[INST] 2+2? [/INST] Four.\n<|endoftext|>[INST]")
    assert targets == " Four.\n<|endoftext|>|  No<|endoftext|>"


def test_refused_conversations_say_why(tmp_path: Path) -> None:
    forgetful = tiny_tokenizer(tmp_path / "a", template=FORGETFUL)
    thoughtful = [*CHAT[:1], {"role": "assistant", "content": "<think>hm</think>4"}, *CHAT[2:]]
    with pytest.raises(DataError, match=r"line 1: .* renders message 2 differently when other messages follow"):
        learned(forgetful, {"messages": thoughtful})
    # a single answer is the last one, which the template leaves alone
    assert learned(forgetful, {"messages": thoughtful[:2]})[1] == "<think>hm</think>4<|im_end|>"

    instruct = tiny_tokenizer(tmp_path / "b", template=INSTRUCT)
    with pytest.raises(DataError, match=r"line 1: .* refuses this conversation: only user and assistant"):
        learned(instruct, {"messages": SYSTEM + CHAT})
    with pytest.raises(DataError, match=r"line 1: message 1 is the assistant's, and answers to nothing"):
        learned(tiny_tokenizer(tmp_path / "c", template=DEFAULT_SYSTEM), {"messages": CHAT[1:]})


def test_prompt_and_response_are_tokenised_apart(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path)
    assert learned(tokenizer, {"prompt": "2+2=", "response": "4"}) == ("2+2=4<|im_end|>", "4<|im_end|>")
    assert learned(tokenizer, {"prompt": "", "response": "4<|im_end|>"}) == ("4<|im_end|>", "4<|im_end|>")
    assert learned(tiny_tokenizer(tmp_path, eos=None), {"prompt": "a", "response": "b"}) == ("ab", "b")
    begun = tiny_tokenizer(tmp_path, begins=True)
    assert learned(begun, {"prompt": "a", "response": "b"}) == ("<|endoftext|>ab<|im_end|>", "b<|im_end|>")
    assert learned(begun, {"messages": CHAT})[0] == tokenizer.apply_chat_template(CHAT, tokenize=False)


def test_all_of_a_text_is_learned(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path)
    assert learned(tokenizer, {"text": "Once"}) == ("Once<|im_end|>", "Once<|im_end|>")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="the tokenizer can't be loaded"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ 1 / 0 }}", "refuses this conversation: ZeroDivisionError"),
        ("{{ 1 + 'a' }}", "refuses this conversation: TypeError"),
        ("{% for i in range(1000000) %}x{% endfor %}", "refuses this conversation: OverflowError"),
        ("{% for x in %}", "refuses this conversation: Expected an expression"),
        ("{{ ''.__class__.__mro__ }}", "refuses this conversation: access to attribute '__class__'"),
        ("always the same", "renders nothing of message 2"),
        ("{% for m in messages %}{{ m.role }}{% generation %}{% endgeneration %}{% endfor %}", "marks nothing of it"),
        (None, "has no chat template to render it with"),
    ],
)
def test_broken_templates(template: str | None, said: str, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path, template=template)
    with pytest.raises(DataError, match=f"line 1: the tokenizer's chat template {said}|line 1: the tokenizer {said}"):
        learned(tokenizer, {"messages": CHAT})


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", ""),
        ("tokenizer.json", "[]"),
        ("tokenizer.json", '{"model": {"type": "Nope"}}'),
        ("tokenizer_config.json", "[]"),
        ("special_tokens_map.json", "{"),
        ("tokenizer_config.json", '{"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", null]}}'),
    ],
)
def test_broken_tokenizers(file: str, content: str, tmp_path: Path) -> None:
    """Nothing in the folder is run, nor is anybody asked whether to."""
    tiny_tokenizer(tmp_path)
    (tmp_path / "mine.py").write_text("raise SystemExit('this ran')")
    (tmp_path / file).write_text(content)
    with pytest.raises(ModelError, match="the tokenizer can't be loaded: "):
        load_tokenizer(tmp_path)
