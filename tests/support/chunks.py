"""Megatron's chunks of a model on each rank of a world, without an engine around them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Built:
    """A rank's part of a model, its weights still what memory held."""

    chunks: list[Any]
    architecture: Any
    transformer_config: Any
    folder: Path
    model_type: str

    def load(self) -> Built:
        """Fill it from its folder."""
        from engines_megatron.weights import load_pretrained

        load_pretrained(self.chunks, self.architecture, self.folder, self.model_type)
        return self


@contextmanager
def built(
    folder: Path, settings: dict[str, Any], *, model_type: str = "language_model", dtype: str = "float32"
) -> Iterator[Built]:
    """Called on every rank; `settings` are those of `support.megatron`."""
    from engines_megatron.runtime.cpu import install

    install()
    import torch

    from engines.weights import PretrainedFolder
    from engines_megatron import groups
    from engines_megatron.architectures import read_architecture
    from engines_megatron.config import MegatronConfig
    from engines_megatron.layout import plan_layout
    from engines_megatron.model.build import build_chunks
    from engines_megatron.model.transformer_config import transformer_config

    model_config = PretrainedFolder(folder).config
    architecture, config = read_architecture(model_config), MegatronConfig(**settings)
    layout = plan_layout(config, architecture, torch.distributed.get_world_size())
    groups.acquire(layout)
    try:
        made = transformer_config(architecture, layout, config, dtype=getattr(torch, dtype), on_cpu=True)
        chunks = build_chunks(
            architecture,
            layout,
            made,
            model_type=model_type,
            model_config=model_config,
            device=torch.device("cpu"),
        )
        with torch.no_grad():
            for chunk in chunks:
                for parameter in chunk.parameters():
                    parameter.fill_(float("nan"))
        yield Built(chunks, architecture, made, folder, model_type)
    finally:
        groups.release()
