"""Every fault of a data file names the file and the line, and says what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engines.errors import DataError
from engines.recipes.data.records import read_records
from engines.recipes.data.samples import Limits, read_samples, scan

LIMITS = Limits(vocab_size=256)
USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "hello"}


def write(path: Path, *records: object) -> Path:
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("\n".join(lines) + "\n")
    return path


GOOD = {"input_ids": [1, 2, 3]}

FAULTS = {
    "broken JSON": ('{"input_ids": [1, 2', ["broken JSON"]),
    "not an object": ([1, 2], ["a record is an object"]),
    "no field": ({}, ["a record has messages, or prompt and response", "no field at all"]),
    "misspelt field": ({"promt": "a", "response": "b"}, ["promt", 'Did you mean "prompt"?']),
    "unknown field": ({"text": "a", "source": "b"}, ["unknown field source beside text"]),
    "two kinds": ({"text": "a", "input_ids": [1]}, ["several kinds", "input_ids, text"]),
    "response missing": ({"prompt": "a"}, ["prompt and response", "this one has prompt"]),
    "text not a string": ({"text": 3}, ["text must be a string, got 3"]),
    "prompt not a string": ({"prompt": None, "response": "b"}, ["prompt must be a string, got null"]),
    "mask too short": ({"input_ids": [1, 2], "loss_mask": [1]}, ["as long as input_ids, 2, but is 1"]),
    "mask not 0 or 1": ({"input_ids": [1, 2], "loss_mask": [0, 0.5]}, ["loss_mask[1] must be 0 or 1, got 0.5"]),
    "ids not integers": ({"input_ids": [True, 2]}, ["input_ids[0] must be an integer, got true"]),
    "ids a string": ({"input_ids": "12"}, ["list of at least one token id"]),
    "no ids": ({"input_ids": []}, ["at least one token id, got []"]),
    "id too large": ({"input_ids": [1, 256]}, ["input_ids[1] is 256", "vocabulary of 256"]),
    "id negative": ({"input_ids": [-1, 2]}, ["input_ids[0] is -1", "vocabulary of 256"]),
    "no messages": ({"messages": []}, ["at least one message"]),
    "no assistant": ({"messages": [USER]}, ["no assistant turn"]),
    "unknown role": (
        {"messages": [USER, {"role": "bot", "content": "x"}]},
        ["message 2", '"bot"', "assistant"],
    ),
    "content missing": ({"messages": [{"role": "user"}, ASSISTANT]}, ["message 1", "it has role"]),
    "content not text": ({"messages": [USER, {"role": "assistant", "content": 1}]}, ["content must be a string"]),
    "message not an object": ({"messages": ["hi"]}, ["message 1", '"hi"']),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_names_file_and_line(name: str, tmp_path: Path) -> None:
    record, words = FAULTS[name]
    path = write(tmp_path / "data.jsonl", GOOD, "", GOOD, record)
    with pytest.raises(DataError) as caught:
        scan(path, LIMITS)
    message = str(caught.value)
    assert message.startswith(f"{path}, line 4: ")
    for word in words:
        assert word in message


def test_files_that_are_no_data(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n\n")
    not_utf8 = tmp_path / "latin.jsonl"
    not_utf8.write_bytes(b'{"text": "caf\xe9"}\n')
    not_parquet = tmp_path / "data.parquet"
    not_parquet.write_bytes(b"nonsense")
    for path, words in (
        (empty, "holds no records"),
        (not_utf8, "line 1: not UTF-8"),
        (not_parquet, "not a Parquet file"),
        (tmp_path / "data.csv", "there is no data file"),
        (write(tmp_path / "data.txt", GOOD), ".jsonl or .parquet"),
    ):
        with pytest.raises(DataError, match=words):
            scan(path, LIMITS)


def test_parquet_is_read_like_jsonl(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 0]}, {"input_ids": [4, 5], "loss_mask": None}]
    parquet = tmp_path / "data.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), parquet)
    rows[1].pop("loss_mask")
    jsonl = write(tmp_path / "data.jsonl", *rows)
    a, b = read_samples(parquet, LIMITS), read_samples(jsonl, LIMITS)
    assert a.fingerprint() == b.fingerprint()
    assert a.mask.tolist() == [False, True, False, True, True]

    chats = [{"messages": [USER, ASSISTANT]}, {"messages": [USER, ASSISTANT, USER, ASSISTANT]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(chats), parquet)
    assert [dict(record.fields) for record, _ in read_records(parquet)] == chats
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"messages": [USER]}]), parquet)
    with pytest.raises(DataError, match=r"data\.parquet, row 1: the conversation has no assistant turn"):
        scan(parquet, LIMITS)


def test_long_samples_are_refused_or_cut(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", GOOD, {"input_ids": list(range(9)), "loss_mask": [0] * 4 + [1] * 5})
    with pytest.raises(DataError, match=r"line 2: the sample has 9 tokens, more than data.max_length: 6"):
        scan(path, Limits(256, max_length=6))
    with pytest.raises(DataError, match=r"line 2: .* 9 tokens, more than engine.max_tokens_per_micro_batch: 8"):
        scan(path, Limits(256, max_tokens_per_micro_batch=8))
    with pytest.raises(DataError, match=r"line 2: .* 6 tokens, more than engine.max_tokens_per_micro_batch: 5"):
        scan(path, Limits(256, max_length=6, truncate=True, max_tokens_per_micro_batch=5))
    cut = read_samples(path, Limits(256, max_length=6, truncate=True))
    assert cut.row(1)["input_ids"].tolist() == [0, 1, 2, 3, 4, 5]
    assert cut.row(1)["loss_mask"].tolist() == [False] * 4 + [True] * 2


def test_the_fingerprint_tells_samples_apart(tmp_path: Path) -> None:
    prints = {
        read_samples(write(tmp_path / "data.jsonl", *records), LIMITS).fingerprint()
        for records in (
            [{"input_ids": [1, 2, 3, 4]}],
            [{"input_ids": [1, 2]}, {"input_ids": [3, 4]}],
            [{"input_ids": [1, 2, 3, 5]}],
            [{"input_ids": [1, 2, 3, 4], "loss_mask": [1, 1, 1, 0]}],
        )
    }
    assert len(prints) == 4
