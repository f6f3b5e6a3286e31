"""A small byte-level tokenizer with chat templates like those of real models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
) + CHATML
"""As SmolLM2's: a system prompt that nobody wrote."""

MARKED = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""With generation markers."""

INSTRUCT = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + '<|endoftext|>' }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}"
    "{% endfor %}"
)
"""As Mistral's: no generation prompt, roles it refuses."""

FORGETFUL = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and not loop.last %}{{ message['content'].split('</think>')[-1] }}"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""As Qwen3's: drops the thoughts of earlier turns."""


def tiny_tokenizer(
    folder: Path, *, template: str | None = CHATML, eos: str | None = "<|im_end|>", begins: bool = False
) -> Any:
    """A tokenizer of 256 byte tokens less three, and three special ones, saved in `folder` and loaded from it.

    `begins`: it puts <|endoftext|> before every text, as Llama's puts its bos.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    kept = [token for token in alphabet if token not in "\u00ff\u00fe\u00fd"]
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *kept])}
    assert len(vocabulary) == 256
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    if begins:
        start = SPECIAL[0]
        tokenizer.post_processor = processors.TemplateProcessing(f"{start} $A", special_tokens=[(start, 0)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos)
    fast.chat_template = template
    fast.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)
