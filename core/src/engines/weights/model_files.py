"""What makes weights a model: its config, generation config, tokenizer and chat templates."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from engines.durable import Written, sync_folder, write_chunks
from engines.errors import ModelError
from engines.model_folder import COMPANIONS, CONFIG, parse_object, read_config


@dataclass(frozen=True)
class ModelFiles:
    """The small files of a model, in memory: what is written later doesn't depend on the folder being there still."""

    path: Path
    """The folder that they are of: a Hugging Face folder, or a checkpoint."""
    contents: Mapping[str, bytes]
    """By name below the folder."""

    @classmethod
    def read(cls, path: str | Path) -> ModelFiles:
        """What there is of them at `path`; nothing, if there is no such folder. Names with a leading dot stay out."""
        folder = Path(path)
        found = {one for pattern in (CONFIG, *COMPANIONS) for one in folder.glob(pattern)}
        files = {file for one in found for file in (one.rglob("*") if one.is_dir() else [one]) if file.is_file()}
        names = {file.relative_to(folder): file for file in sorted(files)}
        return cls(
            folder,
            {
                name.as_posix(): file.read_bytes()
                for name, file in names.items()
                if not any(part.startswith(".") for part in name.parts)
            },
        )

    def write(self, folder: Path, *, besides: Collection[str] = ()) -> dict[str, Written]:
        """Write them to an existing folder, without those named `besides`, and wait until the disk has them."""
        written = {}
        for name in sorted(self.contents.keys() - set(besides)):
            for inner in [*Path(name).parents][-2::-1]:
                (folder / inner).mkdir(exist_ok=True)
            written[name] = write_chunks(folder / name, [self.contents[name]])
        for inner in {(folder / name).parent for name in written}:
            sync_folder(inner)
        return written

    def config(self) -> dict[str, Any]:
        """Contents of config.json. Raises `ModelError` if there is none, or it isn't a JSON object."""
        if CONFIG not in self.contents:
            read_config(self.path)  # which says what is wrong with the folder
            raise ModelError(f"{self.path / CONFIG} was not there when the model was loaded")
        return parse_object(self.contents[CONFIG], self.path / CONFIG)

    @cached_property
    def vocab_size(self) -> int | None:
        """Rows of the embedding; None where config.json, or there being none, doesn't say it."""
        config = self.config() if CONFIG in self.contents else {}
        text = config.get("text_config")
        found = config.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)
        return found if isinstance(found, int) else None
