"""Checkpoints: engines hand over shards, this room writes and reads the files. See docs/checkpoints.md."""

from __future__ import annotations

from engines.checkpoint.fingerprint import compare, fingerprint
from engines.checkpoint.manifest import CheckpointInfo, Manifest, ModelFingerprint
from engines.checkpoint.reading import Checkpoint, PartReader, open
from engines.checkpoint.saving import save
from engines.checkpoint.store import CheckpointStore, Listing
from engines.checkpoint.weights import open_weights

__all__ = [
    "Checkpoint",
    "CheckpointInfo",
    "CheckpointStore",
    "Listing",
    "Manifest",
    "ModelFingerprint",
    "PartReader",
    "compare",
    "fingerprint",
    "open",
    "open_weights",
    "save",
]
