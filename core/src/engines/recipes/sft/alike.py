"""What ranks on several machines, each of which reads recipe and files by itself, must have in common."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Final

from importlib_metadata import version

from engines.recipes.output.changes import flat
from engines.recipes.sft.config import SFTRecipe
from engines.selection import Selection

_SAMPLE: Final = 2**16


def alike(recipe: SFTRecipe, selection: Selection) -> dict[str, Any]:
    """JSON by the name that users know: settings, versions, and digests of model and data."""
    settings = dict(flat(recipe.model_dump(mode="json")))
    del settings["launch.nproc"]  # another launcher decides
    found = {**settings, "engines-core": version("engines-core"), selection.distribution: selection.version}
    found["the files of model.path"] = _digest_of_folder(Path(recipe.model.path).expanduser())
    for key, file in (("data.train", recipe.data.train), ("data.eval", recipe.data.eval)):
        if file is not None:
            found[f"the contents of {key}"] = _digest_of_file(Path(file).expanduser())
    return found


def _digest_of_folder(folder: Path) -> str:
    """Of names, sizes and some bytes of each file: to read many gigabytes of weights once more would take minutes."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(path for path in folder.iterdir() if path.is_file() and path.name[0] != "."):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for place in (0, size // 2, max(0, size - _SAMPLE)):
                file.seek(place)
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest()


def _digest_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=8)).hexdigest()
