"""What can be said about a model, in a Hugging Face folder or a checkpoint, without importing torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.checkpoint_folder import PRETRAINED, CheckpointInfo, is_checkpoint, latest, look, why_no_model
from engines.errors import CheckpointError, ModelError
from engines.model_folder import CONFIG, read_config, read_object

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")


@dataclass(frozen=True)
class ModelFolder:
    """A folder whose config.json can be read and whose weights are all there."""

    path: Path
    vocab_size: int
    checkpoint: CheckpointInfo | None
    """Whose weights these are; None in a Hugging Face folder."""

    @property
    def has_tokenizer(self) -> bool:
        """Whether any file of a tokenizer is there."""
        return any((self.path / name).is_file() for name in _TOKENIZER_FILES)

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer comes with a chat template, in a file of its own or in its config."""
        if (self.path / "chat_template.jinja").is_file():
            return True
        config = self.path / "tokenizer_config.json"
        return config.is_file() and bool(read_object(config).get("chat_template"))


def inspect_model(folder: Path, model_type: str) -> ModelFolder:
    """Look at what model.path names. Raises `ModelError`, `CheckpointError`, naming the file, where it can't load.

    `model_type`: what it shall become; a value model has no head to become a language model.
    """
    config = read_config(folder)
    if not isinstance(config.get("model_type"), str):
        raise ModelError(f"{folder / CONFIG} names no model_type, so nobody knows which model it is")
    checkpoint = _find_weights(folder)
    if model_type == "language_model" and (kind := _other_head(config, checkpoint)):
        raise ModelError(
            f"model.path: {folder} holds {kind}, which has no head for the next token",
            "Only a value model can be made of it. Name the language model that it was trained from.",
        )
    return ModelFolder(folder, _vocab_size(config, folder / CONFIG), checkpoint)


def _other_head(config: dict[str, Any], checkpoint: CheckpointInfo | None) -> str | None:
    """What the weights are, if by name they aren't a language model's."""
    if checkpoint is not None:
        return "a value model" if checkpoint.model_type == "value_model" else None
    named = config.get("architectures")
    name = str(named[0]) if isinstance(named, list) and named else ""
    return f"a {name}" if name.endswith(("ForSequenceClassification", "ForTokenClassification")) else None


def _vocab_size(config: dict[str, Any], file: Path) -> int:
    text = config.get("text_config")
    found = config.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)
    if type(found) is not int or found < 1:
        raise ModelError(f"{file}: vocab_size must be a positive integer, got {found!r}")
    return found


def _find_weights(folder: Path) -> CheckpointInfo | None:
    if error := why_no_model(folder):
        raise error
    if not is_checkpoint(folder):
        _check_weights(folder)
        return None
    try:
        return look(folder)
    except CheckpointError as error:
        raise CheckpointError(f"model.path: {error.message}", latest(folder.parent)) from None


def _check_weights(folder: Path) -> None:
    single, index = (folder / name for name in PRETRAINED)
    if single.is_file():
        _check_safetensors(single)
    elif index.is_file():
        homes = read_object(index).get("weight_map")
        if not isinstance(homes, dict):
            raise ModelError(f"{index} has no weight_map of tensor names to file names")
        for shard in sorted({str(home) for home in homes.values()}):
            if not (folder / shard).is_file():
                raise ModelError(f"{folder / shard} is missing; {index.name} names it")
            _check_safetensors(folder / shard)
    else:
        raise ModelError(
            f"model.path: {folder} holds no weights: neither {single.name} nor {index.name}", _others(folder)
        )


def _check_safetensors(file: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is truncated, or not a safetensors file: {error}") from None


def _others(folder: Path) -> str | None:
    others = sorted(path.name for path in folder.iterdir() if path.suffix in {".bin", ".pt", ".pth", ".gguf"})
    if not others:
        return None
    return f"It holds {', '.join(others)}: load it with transformers and save_pretrained it as safetensors."
