"""What the documentation says of the code, written from the code. One module for each kind of thing."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The repository."""
