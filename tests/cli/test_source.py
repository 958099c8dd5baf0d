from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict, IterableDataset

from grpo_trainer.cli.arguments import DatasetEntry
from grpo_trainer.cli.source import files_of, kind_of, load_rows

ROWS = [{"prompt": f"question {i}", "answer": i} for i in range(10)]


def lines(path: Path, rows: list) -> str:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return str(path)


def rows(path, split: str = "train", *, streaming: bool = False, evaluates: bool = False) -> list[int]:
    loaded = load_rows(DatasetEntry(path=path, split=split), seed=0, streaming=streaming, evaluates=evaluates)
    assert isinstance(loaded, IterableDataset if streaming else Dataset)
    return [row["answer"] for row in loaded]


@pytest.fixture
def parts(tmp_path) -> list[str]:
    return [lines(tmp_path / f"part{i}.jsonl", ROWS[5 * i : 5 * i + 5]) for i in range(2)]


@pytest.mark.parametrize("streaming", [False, True])
def test_json_lines_are_read_from_a_file_a_list_and_a_pattern(parts, tmp_path, streaming):
    assert rows(parts[1], streaming=streaming) == [5, 6, 7, 8, 9]
    assert rows(parts[::-1], streaming=streaming) == [5, 6, 7, 8, 9, 0, 1, 2, 3, 4]  # in the order of the list
    assert rows(str(tmp_path / "part*.jsonl"), streaming=streaming) == list(range(10))
    assert rows(lines(tmp_path / "all.jsonl.gz", ROWS), streaming=streaming) == list(range(10))


@pytest.mark.parametrize(
    ("split", "expected"), [("train[:3]", [0, 1, 2]), ("train[8:]", [8, 9]), ("train[3:5]", [3, 4])]
)
@pytest.mark.parametrize("streaming", [False, True])
def test_a_part_of_a_split_is_read_from_files_folders_and_streams(tmp_path, split, expected, streaming):
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    assert rows(lines(tmp_path / "all.jsonl", ROWS), split, streaming=streaming) == expected
    assert rows(str(tmp_path / "saved"), split, streaming=streaming) == expected


def test_shares_and_sums_of_splits_need_a_length(tmp_path):
    whole = Dataset.from_list(ROWS)
    DatasetDict(train=whole, held=whole.select([9])).save_to_disk(tmp_path / "saved")
    assert rows(str(tmp_path / "saved"), "train[:20%]+held") == [0, 1, 9]
    assert rows(str(tmp_path / "saved"), "train[-2:]") == [8, 9]
    path = lines(tmp_path / "all.jsonl", ROWS)
    assert rows(path, "train[-2:]") == [8, 9]
    with pytest.raises(ValueError, match=r"'train\[:20%\]' needs the number of rows, which a stream does not tell"):
        rows(path, "train[:20%]", streaming=True)
    with pytest.raises(ValueError, match=r"no split 'hled'\. Did you mean 'held'\? Its splits: train, held"):
        rows(str(tmp_path / "saved"), "train+hled")
    assert rows(str(tmp_path / "saved"), "train[8:99]") == [8, 9]  # as Python cuts lists


def test_one_split_is_not_enough_to_evaluate_on(tmp_path):
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    for path in (lines(tmp_path / "all.jsonl", ROWS), str(tmp_path / "saved")):
        with pytest.raises(ValueError, match=r"one split only, train, .* hold rows out with test_split_size"):
            rows(path, "test", evaluates=True)
        assert rows(path, "train[-1:]", evaluates=True) == [9]
    with pytest.raises(ValueError, match="files have one split, train, and no 'validation'"):
        rows(str(tmp_path / "all.jsonl"), "validation")


def test_a_task_of_the_package_has_two_splits(tmp_path):
    entry = DatasetEntry(path="builtin:sums", split="test[:2]")
    assert len(load_rows(entry, seed=0, streaming=False)) == 2
    assert len(list(load_rows(DatasetEntry(path="builtin:sums", split="test"), seed=0, streaming=True))) == 64


def test_a_loader_of_datasets_with_its_files_is_taken_as_trl_takes_it(parts):
    entry = DatasetEntry(path="json", data_files={"train": parts[0], "other": parts[1]}, split="other")
    assert load_rows(entry, seed=0, streaming=False)["answer"][:] == [5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere.jsonl", "there is no such file"),
        ("nowhere/*.jsonl", "no file fits this pattern"),
        (["nowhere.jsonl", "else.jsonl"], r"there is no such file: nowhere\.jsonl, else\.jsonl"),
        ([], "the list of files is empty"),
    ],
)
def test_files_that_are_not_there_are_refused(path, message):
    with pytest.raises(ValueError, match=message):
        files_of(path)


def test_files_of_one_kind_are_read_by_its_loader(tmp_path):
    assert kind_of(["a.jsonl", "b.json", "c.jsonl.gz"]) == "json"
    assert kind_of(["a.parquet"]) == "parquet" and kind_of(["a.csv"]) == "csv"
    with pytest.raises(ValueError, match="several kinds: csv, json"):
        kind_of(["a.csv", "b.json"])
    with pytest.raises(ValueError, match=r"a\.txt is none of \.jsonl"):
        kind_of(["a.txt", "b.csv"])


def test_a_folder_and_a_name_on_the_hub_are_no_files(tmp_path):
    (tmp_path / "odd[1].jsonl").mkdir()
    assert files_of(str(tmp_path / "odd[1].jsonl")) is None
    assert files_of("openai/gsm8k") is None
    assert files_of("hf://datasets/a/b.jsonl") == ["hf://datasets/a/b.jsonl"]  # `datasets` reads addresses too
