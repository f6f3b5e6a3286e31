"""What a checkpoint says about itself: `manifest.json`, written last, and `index.json`."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AwareDatetime, Field, JsonValue, ValidationError

from engines.checkpoint_folder import strict_json
from engines.checkpoint_folder.names import COPY, INDEX, MANIFEST, STATE, has_manifest
from engines.config import Config
from engines.errors import CheckpointError

M = TypeVar("M", bound=Config)
Part = Literal["model", "optimizer"]
Content = Literal["model", "optimizer", "state", "huggingface"]

CONTENTS: tuple[Content, ...] = ("model", "optimizer", "state", "huggingface")
"""All that a checkpoint can hold."""
RESUMABLE: tuple[Content, ...] = ("model", "optimizer", "state")
"""What a run goes on from."""

FORMAT = 1
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
"""safetensors' names of the dtypes that are read and written, and torch's."""

Count = Annotated[int, Field(ge=0)]
Extents = tuple[Count, ...]
FileName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*\.(json|safetensors)$")]
"""Of a file that core writes. No folder in it: nothing outside the checkpoint is ever opened."""

AnyFileName = Annotated[str, Field(pattern=r"^[^./\\][^/\\]*(/[^./\\][^/\\]*)*$")]
"""Of one of the model's own files too; no part of it starts with a dot, so it leads nowhere else either."""

DtypeName = Annotated[str, Field(pattern=f"^({'|'.join(DTYPES)})$")]


class ModelFingerprint(Config):
    """Which model, and which vocabulary, a checkpoint is of."""

    config: dict[str, JsonValue]
    """The model folder's config.json without what says nothing about the weights (paths, versions, dtype)."""
    tokenizer_xxh3: str | None
    """xxh3_128 of its tokenizer.json; None where it has none."""

    @property
    def architecture(self) -> str:
        """The class that transformers would build."""
        named = self.config.get("architectures")
        return str(named[0]) if isinstance(named, list) and named else "unknown"


class CheckpointInfo(Config):
    """What is saved, by whom, at which layout."""

    step: Count
    """Optimizer steps done."""
    backend: str
    device: str
    distributions: dict[str, str]
    """Versions of what took part, by distribution: engines-core, the engine's own, torch, ..."""
    model: ModelFingerprint
    model_type: str = "language_model"
    """What the weights make of it: "language_model" or "value_model"."""
    optimizer: dict[str, JsonValue] | None
    """Settings that a resumed run must share; None where none is held."""
    world_size: Annotated[int, Field(ge=1)]
    layout: dict[str, int | bool]
    """Every parallel size under its name in a recipe."""


class FileRecord(Config):
    """A file as it was written."""

    size: Count
    xxh3: str
    """xxh3_128 of its bytes, in hex."""


class Manifest(Config):
    """`manifest.json`: a folder that has a valid one is a complete checkpoint."""

    format: Literal[1] = 1
    saved: AwareDatetime | None = None
    """When it was written, in UTC; None: manifests didn't say so yet."""
    info: CheckpointInfo
    contents: tuple[Part, ...]
    """Parts whose tensors are there."""
    files: dict[AnyFileName, FileRecord]
    """Every other file of the folder."""

    @property
    def held(self) -> tuple[Content, ...]:
        """All that is there: parts, the run's state (with it that of ranks), a Hugging Face copy."""
        state: tuple[Content, ...] = ("state",) if STATE in self.files else ()
        copy: tuple[Content, ...] = ("huggingface",) if any(n.startswith(f"{COPY}/") for n in self.files) else ()
        return (*self.contents, *state, *copy)

    @property
    def size(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(file.size for file in self.files.values())


class Piece(Config):
    """A block of a tensor, as one entry of a safetensors file."""

    file: FileName
    entry: str
    offset: Extents
    shape: Extents


class TensorRecord(Config):
    """A tensor and the disjoint pieces that cover it."""

    shape: Extents
    dtype: DtypeName
    """In safetensors' spelling."""
    pieces: tuple[Piece, ...]


class Index(Config):
    """`index.json`: every tensor by key."""

    tensors: dict[str, TensorRecord]


def unfit(contents: Collection[str]) -> str | None:
    """What is wrong with such contents of a checkpoint; None: nothing."""
    if not {"model", "huggingface"} & set(contents):
        return "model or huggingface must be among them, or the checkpoint is of no use"
    if "model" not in contents and {"optimizer", "state"} & set(contents):
        return "optimizer and state are of no use without model"
    return None


def checksum(manifest: dict[str, Any]) -> str:
    """What a manifest, without it, has as `xxh3`."""
    import xxhash

    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return str(xxhash.xxh3_128_hexdigest(text.encode()))


def seal(manifest: Manifest) -> bytes:
    """The contents of `manifest.json`: the manifest and a checksum of it."""
    data = manifest.model_dump(mode="json")
    return json.dumps({**data, "xxh3": checksum(data)}, indent=1).encode()


def read_manifest(folder: Path) -> Manifest:
    """Raises `CheckpointError` for a folder without one (incomplete), and for one that was changed (damaged)."""
    if not folder.is_dir():
        raise CheckpointError(f"there is no checkpoint {folder}")
    file = folder / MANIFEST
    if not has_manifest(folder):
        raise CheckpointError(f"{folder} is not a complete checkpoint: it has no {MANIFEST}")
    data = strict_json.read(file)
    if not isinstance(data, dict) or "format" not in data:
        raise CheckpointError(f"{file} is damaged: it is not a checkpoint's manifest")
    if data["format"] != FORMAT:
        raise CheckpointError(
            f"{file} has format {data['format']!r}; this version of engines-core reads format {FORMAT}",
            "use the version of engines-core that wrote it",
        )
    if data.pop("xxh3", None) != checksum(data):
        raise CheckpointError(f"{file} is damaged: its checksum is not that of its contents")
    return _validated(Manifest, data, file)


def read_index(folder: Path) -> Index:
    """Raises `CheckpointError` if it is missing or no index."""
    return _validated(Index, strict_json.read(folder / INDEX), folder / INDEX)


def _validated(model: type[M], data: Any, file: Path) -> M:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"{file} is damaged: {place}: {first['msg']}") from error
