"""`engine.toml`: what a distribution says about its engines, read without running any of its code.

    api = 1
    summary = "FSDP2: parameters sharded with fully_shard"

    [[engine]]
    backend      = ["fsdp2"]
    model_type   = ["language_model"]
    device       = ["cpu", "cuda"]
    engine       = "engines_fsdp.engine:FSDP2Engine"
    config       = "engines_fsdp.config:FSDP2Config"
    capabilities = ["hybrid_shard", "export"]
    needs        = ["torch", "transformers"]

Version, requirements and home page are the distribution's own metadata and are not written here again.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from engines.capabilities import CAPABILITIES, is_capability
from engines.devices import BUILT_IN, DeviceSpec
from engines.errors import ContractError, did_you_mean

MANIFEST_NAME = "engine.toml"
API = 1
"""The version of the contract that this core speaks."""


def _distinct(words: tuple[str, ...]) -> tuple[str, ...]:
    twice = sorted({word for word in words if words.count(word) > 1})
    if twice:
        raise ValueError(f"named twice: {', '.join(twice)}")
    return words


def _not_empty(words: tuple[str, ...]) -> tuple[str, ...]:
    if not words:
        raise ValueError("is empty")
    return words


def _capability(word: str) -> str:
    if not is_capability(word):
        raise ValueError(
            f'"{word}" is not a capability of api {API}.{did_you_mean(word, CAPABILITIES)}'
            " One of your own is spelt x-vendor.name"
        )
    return word


def _range(text: str) -> str:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet  # late: hardly a manifest has one

    try:
        SpecifierSet(text)
    except InvalidSpecifier:
        raise ValueError(f'"{text}" is not a range of versions, such as ">=1.2,<2"') from None
    return text


Key = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.\-]*$")]
Module = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")]
Attribute = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$")]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]
Text = Annotated[str, Field(min_length=1)]
Range = Annotated[str, AfterValidator(_range)]

# TOML knows lists only; what is read stays as it is, hence tuples (which a strict model takes from a tuple alone).
Keys = Annotated[tuple[Key, ...], Field(strict=False), AfterValidator(_not_empty), AfterValidator(_distinct)]
Modules = Annotated[tuple[Module, ...], Field(strict=False), AfterValidator(_distinct)]
Capabilities = Annotated[
    tuple[Annotated[str, AfterValidator(_capability)], ...], Field(strict=False), AfterValidator(_distinct)
]
Paths = Annotated[tuple[str, ...], Field(strict=False)]


class _Table(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class EngineEntry(_Table):
    """One `[[engine]]`: a class, the words that choose it, and what must hold where it runs."""

    backend: Keys = Field(description="the words that choose it in a recipe (`engine.strategy`)")
    model_type: Keys = Field(description="language_model, value_model")
    device: Keys = Field(description="names of devices that it runs on")
    priority: int = Field(100, description="among owners of the same (model_type, backend, device)")
    engine: Attribute = Field(description="package.module:Class, a BaseEngine")
    config: Attribute = Field(description="package.module:Class, its settings; its module imports no torch")
    capabilities: Capabilities = Field((), description="closed vocabulary, or x-vendor.name")
    needs: Modules = Field((), description="modules that must be findable, or the engine is unavailable")
    install: dict[Module, Text] = Field({}, description="how to get modules of `needs` that no package index brings")
    versions: dict[Key, Range] = Field(
        {}, description='ranges of distributions that cannot be requirements, as `mindspeed = "==0.16.*"`'
    )
    env: dict[Variable, str] = Field({}, description="environment variables set before it is imported")
    process: Literal["shared", "exclusive"] = Field(
        "shared", description="exclusive: no other backend may live in this process"
    )
    prepare: Attribute | None = Field(
        None, description="package.module:function, run once in every process that loads the engine"
    )
    before: Modules = Field((), description="modules that `prepare` must precede")

    @model_validator(mode="after")
    def _install_is_of_needs(self) -> EngineEntry:
        for module in self.install:
            if module not in self.needs:
                raise ValueError(f"`install` says how to get {module}, which `needs` does not name")
        return self

    @model_validator(mode="after")
    def _before_has_prepare(self) -> EngineEntry:
        if self.before and self.prepare is None:
            raise ValueError("`before` names modules that `prepare` must precede, but there is no `prepare`")
        return self


class DeviceEntry(_Table):
    """One `[[device]]`: a device that core does not know."""

    name: Key = Field(description="the word that recipes and `device` lists use")
    rank: int = Field(gt=0, description="the highest that is present is chosen; cpu has 0")
    nodes: Paths = Field((), description="file patterns of which one exists where the device is present")
    module: Module = Field(description="the module whose import makes torch know it, needed by every engine on it")
    dist_backend: Key = Field(description="of torch.distributed")
    visible_devices_env: Variable | None = Field(None, description="the variable that hides devices")
    torch_device: Key | None = Field(None, description="the name in torch, if another")
    install: Text | None = Field(None, description="how to get `module`, if no package index brings it")

    @model_validator(mode="after")
    def _name_is_free(self) -> DeviceEntry:
        if self.name in BUILT_IN:
            raise ValueError(f'"{self.name}" is described by core; choose another name')
        return self

    def spec(self) -> DeviceSpec:
        """The device as the rest of core knows it."""
        return DeviceSpec(
            name=self.name,
            rank=self.rank,
            nodes=self.nodes,
            module=self.module,
            dist_backend=self.dist_backend,
            visible_devices_env=self.visible_devices_env,
            torch_device=self.torch_device or self.name,
            install=self.install,
        )


class Manifest(_Table):
    """The whole of `engine.toml`."""

    api: Literal[1] = Field(description="version of the contract")
    summary: str = Field(min_length=1, description="one line for `engines list`")
    engine: Annotated[tuple[EngineEntry, ...], Field(strict=False)] = Field(description="at least one")
    device: Annotated[tuple[DeviceEntry, ...], Field(strict=False)] = ()

    @model_validator(mode="after")
    def _keys_are_distinct(self) -> Manifest:
        if not self.engine:
            raise ValueError("declares no [[engine]]")
        owners: dict[tuple[str, str, str], str] = {}
        for entry in self.engine:
            for backend in entry.backend:
                for model_type in entry.model_type:
                    for device in entry.device:
                        key = (model_type, backend, device)
                        if key in owners:
                            raise ValueError(f"({', '.join(key)}) is declared by two [[engine]] entries")
                        owners[key] = entry.engine
        _distinct(tuple(entry.name for entry in self.device))
        return self


def parse_manifest(data: bytes) -> Manifest:
    """The manifest in the bytes of an `engine.toml`.

    Raises ContractError with one line that names every fault and a remedy.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ContractError(f"not UTF-8: {error.reason} at byte {error.start}", "save it as UTF-8") from None
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ContractError(f"not TOML: {error}", "mend its syntax") from None
    if not table:
        raise ContractError("the manifest is empty", f"it needs at least `api = {API}`, `summary` and one [[engine]]")
    _check_api(table)
    try:
        return Manifest.model_validate(table)
    except ValidationError as error:
        raise ContractError(describe_faults(error), "mend these keys; `engines schema manifest` lists all") from None


def _check_api(table: Mapping[str, Any]) -> None:
    """Before anything else: the keys of another api are not ours to judge."""
    api = table.get("api", API)
    if type(api) is not int:
        raise ContractError(f"`api` is {api!r}, not a whole number", f"write `api = {API}`")
    if api != API:
        older = "its distribution" if api < API else "engines-core"
        raise ContractError(f"api {api} is not spoken: this engines-core speaks api {API}", f"upgrade {older}")


def describe_faults(error: ValidationError, table: type[BaseModel] = Manifest) -> str:
    """All faults of a `table` in one line, each with the key that it belongs to."""
    return "; ".join(
        _describe(table, fault["loc"], fault["type"], fault["msg"], fault["input"]) for fault in error.errors()
    )


def _describe(top: type[BaseModel], loc: tuple[int | str, ...], kind: str, message: str, found: Any) -> str:
    where = ""
    for part in loc:
        where += f"[{part}]" if isinstance(part, int) else f".{part}" if where else part
    where = f"`{where}` " if where else ""
    match kind:
        case "extra_forbidden":
            tables: dict[int | str, type[BaseModel]] = {"engine": EngineEntry, "device": DeviceEntry}
            table = tables.get(loc[0], top) if len(loc) > 1 else top
            return f"{where}is not a key.{did_you_mean(str(loc[-1]), table.model_fields)}"
        case "missing":
            return f"{where}is missing"
        case "value_error":
            return where + message.removeprefix("Value error, ")
        case "string_pattern_mismatch":
            return f"{where}is {found!r}, {message[0].lower()}{message[1:]}"
        case "tuple_type":
            return f"{where}must be a list, not {type(found).__name__}"
        case _:
            return f"{where}is {found!r}: {message[0].lower()}{message[1:]}"
