"""A checkpoint, and a folder of them, as manifests and files tell: a look that needs no torch."""

from __future__ import annotations

from engines.checkpoint_folder.manifest import CheckpointInfo, Manifest, ModelFingerprint, checksum, read_manifest
from engines.checkpoint_folder.model import latest, look, why_no_model
from engines.checkpoint_folder.names import (
    COPY,
    INDEX,
    MANIFEST,
    PRETRAINED,
    STATE,
    STEP,
    enclosing,
    has_manifest,
    is_checkpoint,
    needed_for_weights,
    steps,
)

__all__ = [
    "COPY",
    "INDEX",
    "MANIFEST",
    "PRETRAINED",
    "STATE",
    "STEP",
    "CheckpointInfo",
    "Manifest",
    "ModelFingerprint",
    "checksum",
    "enclosing",
    "has_manifest",
    "is_checkpoint",
    "latest",
    "look",
    "needed_for_weights",
    "read_manifest",
    "steps",
    "why_no_model",
]
