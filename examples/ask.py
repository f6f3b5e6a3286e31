"""Ask models the same question and print their answers. Plain transformers: nothing of engines is imported.

Usage: python examples/ask.py PROMPT [LABEL=]FOLDER ...
"""

from __future__ import annotations

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

MAX_NEW_TOKENS = 100


def main(prompt: str, *models: str) -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    print(f"\n? {prompt}", flush=True)
    for model in models:
        label, _, folder = model.rpartition("=")
        print(f"\n{label or folder}:\n{indent(answer(Path(folder), prompt))}", flush=True)


def answer(folder: Path, prompt: str) -> str:
    """The most likely answer to `prompt` of the model in the Hugging Face folder `folder`."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    conversation = [{"role": "user", "content": prompt}]
    inputs = tokenizer.apply_chat_template(
        conversation, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    generated = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)[0]
    text = tokenizer.decode(generated[inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()
    ended = generated[-1].item() == tokenizer.eos_token_id
    return text if ended else f"{text} ..."


def indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
