"""Checkpoints: engines hand over shards, this room writes and reads the files. See docs/checkpoints.md."""

from __future__ import annotations

from engines.checkpoint.background import Saver
from engines.checkpoint.reading import Checkpoint, PartReader, open
from engines.checkpoint.saving import Contents, save
from engines.checkpoint.weights import open_weights
from engines.checkpoint_folder import CheckpointInfo, Manifest, ModelFingerprint
from engines.checkpoint_folder.identity import compare, fingerprint
from engines.checkpoint_folder.store import CheckpointStore, Listing

__all__ = [
    "Checkpoint",
    "CheckpointInfo",
    "CheckpointStore",
    "Contents",
    "Listing",
    "Manifest",
    "ModelFingerprint",
    "PartReader",
    "Saver",
    "compare",
    "fingerprint",
    "open",
    "open_weights",
    "save",
]
