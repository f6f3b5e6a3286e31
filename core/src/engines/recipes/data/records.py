"""Records of JSONL and Parquet files, checked for their form; every fault names the file and the line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from engines.errors import DataError, did_you_mean

Kind = Literal["messages", "prompt_response", "text", "input_ids"]

FORMS: Final[Mapping[Kind, tuple[frozenset[str], frozenset[str]]]] = {
    "messages": (frozenset({"messages"}), frozenset()),
    "prompt_response": (frozenset({"prompt", "response"}), frozenset()),
    "text": (frozenset({"text"}), frozenset()),
    "input_ids": (frozenset({"input_ids"}), frozenset({"loss_mask"})),
}
"""Each kind of record: the fields that it must have, and those that it may have."""

ROLES: Final = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Record:
    """One record and where it stands."""

    place: str
    """File and line (Parquet: row), counted from 1, as messages name it."""
    fields: Mapping[str, Any]

    def fault(self, message: str, remedy: str | None = None) -> DataError:
        """The error to raise about this record."""
        return DataError(f"{self.place}: {message}", remedy)


def read_records(path: Path) -> Iterator[tuple[Record, Kind]]:
    """The records of a file with their kinds, lazily, in file order.

    Raises `DataError` for a file that is missing, empty or of an unknown format, and for the first record that
    is broken, has unknown or missing fields, or values of the wrong type or length.
    """
    empty = True
    for record in _raw_records(path):
        empty = False
        yield record, check_form(record)
    if empty:
        raise DataError(f"{path} holds no records")


def check_form(record: Record) -> Kind:
    """The kind of a record. Raises `DataError` for one that is of none, or whose values have the wrong form."""
    kind = _kind(record)
    match kind:
        case "messages":
            _check_messages(record)
        case "input_ids":
            _check_tokens(record)
        case _:
            for name in sorted(FORMS[kind][0]):
                _check_text(record, name, record.fields[name])
    return kind


def _raw_records(path: Path) -> Iterator[Record]:
    if path.is_dir():
        raise DataError(f"{path} is a folder, not a data file")
    if not path.is_file():
        raise DataError(f"there is no data file {path}")
    match path.suffix:
        case ".jsonl":
            return _read_jsonl(path)
        case ".parquet":
            return _read_parquet(path)
        case _:
            raise DataError(f"{path}: data files are .jsonl or .parquet")


def _read_jsonl(path: Path) -> Iterator[Record]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                fields = json.loads(text, object_pairs_hook=_without_doubles)
            except UnicodeDecodeError as error:
                raise DataError(f"{place}: not UTF-8: {error.reason} at byte {error.start}") from None
            except _Twice as error:
                raise DataError(f"{place}: {error} stands twice in an object", "Remove one of them.") from None
            except (ValueError, RecursionError) as error:
                raise DataError(f"{place}: broken JSON: {error}") from None
            if not isinstance(fields, dict):
                raise DataError(f"{place}: a record is an object, got {_shown(fields)}")
            yield Record(place, fields)


class _Twice(Exception):
    """A key that stands twice, of which JSON would keep the last."""


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise _Twice(next(name for name in names if names.count(name) > 1))
    return fields


def _read_parquet(path: Path) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            if twice := sorted({name for name in columns if columns.count(name) > 1}):
                raise DataError(f"{path}: several columns are called {', '.join(twice)}", "Remove all but one.")
            number = 0
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield Record(f"{path}, row {number}", _without_nulls(row))
    except DataError:
        raise
    except (pyarrow.ArrowException, ValueError, OverflowError, OSError) as error:
        raise DataError(f"{path} is not a Parquet file that can be read: {error}") from None


def _without_nulls(value: Any) -> Any:
    """Parquet gives every row every column, and every struct every field; null is what JSON leaves out."""
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [_without_nulls(inner) for inner in value]
    return value


def _kind(record: Record) -> Kind:
    present = set(record.fields)
    complete = [kind for kind, (required, _) in FORMS.items() if required <= present]
    forms = "a record has messages, or prompt and response, or text, or input_ids and perhaps loss_mask"
    if len(complete) > 1:
        raise record.fault(f"fields of several kinds: {', '.join(sorted(present))}; {forms}")
    known = {name for required, optional in FORMS.values() for name in required | optional}
    if not complete:
        hints = "".join(did_you_mean(name, known - present) for name in sorted(present - known))
        raise record.fault(f"{forms}; this one has {', '.join(sorted(present)) or 'no field at all'}.{hints}")
    required, optional = FORMS[complete[0]]
    if unknown := sorted(present - required - optional):
        fields = "field" if len(unknown) == 1 else "fields"
        hint = did_you_mean(unknown[0], required | optional)
        raise record.fault(f"unknown {fields} {', '.join(unknown)} beside {' and '.join(sorted(required))}.{hint}")
    return complete[0]


def _check_messages(record: Record) -> None:
    messages = record.fields["messages"]
    if not isinstance(messages, list) or not messages:
        raise record.fault(f"messages must be a list of at least one message, got {_shown(messages)}")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            found = ", ".join(sorted(message)) if isinstance(message, dict) else _shown(message)
            raise record.fault(f"message {number} must have role and content and nothing else, it has {found}")
        if message["role"] not in ROLES:
            raise record.fault(
                f"message {number} has the role {_shown(message['role'])}; roles are {', '.join(ROLES)}"
            )
        _check_text(record, f"message {number}: content", message["content"])
    if all(message["role"] != "assistant" for message in messages):
        raise record.fault("the conversation has no assistant turn, so there is nothing to learn")


def _check_text(record: Record, what: str, value: Any) -> None:
    if not isinstance(value, str):
        raise record.fault(f"{what} must be a string, got {_shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = ascii(value[error.start])
        raise record.fault(f"{what} holds {half}, half a surrogate pair, which is no character") from None


def _check_tokens(record: Record) -> None:
    ids = record.fields["input_ids"]
    if not isinstance(ids, list) or not ids:
        raise record.fault(f"input_ids must be a list of at least one token id, got {_shown(ids)}")
    for index, value in enumerate(ids):
        if type(value) is not int:
            raise record.fault(f"input_ids[{index}] must be an integer, got {_shown(value)}")
    if "loss_mask" not in record.fields:
        return
    mask = record.fields["loss_mask"]
    if not isinstance(mask, list) or len(mask) != len(ids):
        length = len(mask) if isinstance(mask, list) else _shown(mask)
        raise record.fault(f"loss_mask must be as long as input_ids, {len(ids)}, but is {length}")
    for index, value in enumerate(mask):
        if value not in (0, 1):
            raise record.fault(f"loss_mask[{index}] must be 0 or 1, got {_shown(value)}")


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
