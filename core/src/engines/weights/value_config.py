"""The config.json of a value model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engines.errors import ModelError


def value_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config`, a language model's or a value model's, as of the class of transformers that loads a value model.

    That is the sequence classification of one label, whose head is `score.weight`. Raises `ModelError` where
    transformers has none for the architecture.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as NAMES

    kind = config.get("model_type")
    if kind not in NAMES:
        raise ModelError(
            f"a value model is exported as a sequence classification; transformers has none of model_type {kind!r}",
            "Save a checkpoint instead.",
        )
    labels = {} if len(config.get("id2label") or ()) == 1 else _ONE_LABEL
    return {**config, **labels, "architectures": [NAMES[kind]]}


_ONE_LABEL = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
"""What transformers writes for `num_labels=1`."""
