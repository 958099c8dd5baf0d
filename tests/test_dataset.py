"""Datasets as they are given: bad rows are named before anything is trained, and a filter takes out long prompts."""

from __future__ import annotations

import pytest
from datasets import Dataset, DatasetDict, IterableDatasetDict
from torch.utils.data import Dataset as TorchDataset

from grpo_trainer import dataset as module
from grpo_trainer.data import PromptLimit, PromptRenderer
from grpo_trainer.dataset import check_dataset, check_eval_dataset, check_reward_columns, first_row
from grpo_trainer.rewards.base import RewardSet

LENGTHS = [3, 9, 2, 8, 1]  # a character is a token
ROWS = [{"prompt": "x" * n, "answer": n} for n in LENGTHS]


class Rows(TorchDataset):
    """A dataset with a length and nothing else, as torch has them; counts what is read."""

    def __init__(self, rows):
        self.rows, self.reads = rows, []

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        self.reads.append(index)
        return self.rows[index]


@pytest.fixture
def check(tiny_tokenizer):
    """``check(dataset, **limit) -> (dataset, [what was said])``."""

    def run(dataset, name="train_dataset", **limit):
        said: list[str] = []
        limits = PromptLimit(tokenizer=tiny_tokenizer, **limit)
        return check_dataset(name, dataset, PromptRenderer(tiny_tokenizer), limits, said.append), said

    return run


def kinds(rows):
    return {"datasets": Dataset.from_list(rows), "list": rows, "tuple": tuple(rows), "torch": Rows(rows)}


# --- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["datasets", "list", "tuple", "torch"])
def test_a_dataset_without_fault_is_handed_back_and_nothing_is_said(check, kind):
    dataset = kinds(ROWS)[kind]
    assert check(dataset) == (dataset, [])
    assert check(dataset)[0] is dataset


def test_no_dataset_is_none(check):
    assert check(None) == (None, [])


BAD = {
    "no column": ({"question": "x"}, "has no column 'prompt'; its columns: question"),
    "an empty prompt": ({"prompt": ""}, "the prompt is empty"),
    "no prompt": ({"prompt": None}, "must be a string or .*got NoneType"),
    "a number": ({"prompt": 3}, "must be a string or .*got int"),
    "no message": ({"prompt": []}, "must be a string or .*got list"),
    "a message without content": ({"prompt": [{"role": "user", "content": None}]}, "message 0 .*has no 'content'"),
    "a message without a role": (
        {"prompt": [{"role": "user", "content": "x"}, {"content": "x"}]},
        "message 1 of the prompt has no 'role'",
    ),
    "no row": ("x", "is a str, not a mapping of columns"),
    "another format": (
        {"prompt": [{"role": "user", "content": "x"}]},
        r"mixes prompts that are strings \(row 0 of train_dataset\) and lists of messages \(row 2 of train_dataset\)",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_row_is_named_by_its_index(check, case):
    row, message = BAD[case]
    with pytest.raises(ValueError, match=message) as error:
        check([*ROWS[:2], row, *ROWS[3:]])
    assert "row 2 of train_dataset" in str(error.value)


def test_many_rows_are_looked_at_in_part_unless_the_policy_decides_about_each(check, monkeypatch):
    monkeypatch.setattr(module, "ROWS_CHECKED", 2)
    rows = [*ROWS, {"prompt": ""}]
    for limit in ({}, {"max_prompt_length": 20}):
        dataset = Rows(rows)
        check(dataset, **limit)
        assert dataset.reads == [0, 1]
    for policy in ("filter", "error"):
        with pytest.raises(ValueError, match="row 5 of train_dataset: the prompt is empty"):
            check(Rows(rows), max_prompt_length=20, overlong=policy)


def test_a_prompt_that_leaves_no_room_for_a_completion_is_named(check):
    with pytest.raises(
        ValueError, match=r"row 1 of train_dataset: the prompt has 9 tokens.*=4 .* context of 12 tokens"
    ):
        check(ROWS, context=12, max_completion_length=4)


# --- prompts that are too long ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["datasets", "list", "tuple", "torch"])
def test_a_filter_leaves_out_long_prompts_and_says_how_many_once(check, kind):
    left, said = check(kinds(ROWS)[kind], max_prompt_length=3, overlong="filter")
    assert len(left) == 3
    assert [left[i]["answer"] for i in range(3)] == [3, 2, 1]
    assert isinstance(left, {"datasets": Dataset, "list": list, "tuple": list, "torch": TorchDataset}[kind])
    assert len(said) == 1
    assert "train_dataset: 2 of 5 rows are left out" in said[0] and "max_prompt_length=3" in said[0]


def test_a_filter_also_leaves_out_what_has_no_room_in_the_context(check):
    left, said = check(ROWS, context=12, max_completion_length=4, max_prompt_length=9, overlong="filter")
    assert [row["answer"] for row in left] == [3, 2, 8, 1]  # 9 + 4 > 12
    assert "1 of 5 rows" in said[0] and "max_completion_length=4" in said[0]


def test_a_filter_that_finds_nothing_hands_the_dataset_back(check):
    assert check(ROWS, max_prompt_length=9, overlong="filter") == (ROWS, [])


def test_a_filter_that_leaves_nothing_is_refused_with_the_remedy(check):
    with pytest.raises(
        ValueError, match=r"train_dataset: all 2 prompts have more than max_prompt_length=7 .*Raise max_"
    ):
        check([ROWS[1], ROWS[3]], max_prompt_length=7, overlong="filter")


def test_the_rows_of_messages_are_those_of_the_dataset_as_it_was_given(check):
    with pytest.raises(ValueError, match="row 4 of train_dataset: the prompt is empty"):  # row 2 of what is kept
        check([*ROWS[:4], {"prompt": ""}], max_prompt_length=3, overlong="filter")


def test_an_error_names_row_length_and_remedy(check):
    with pytest.raises(
        ValueError,
        match=r"row 1 of train_dataset: the prompt has 9 tokens, more than max_prompt_length=8\. Raise "
        r"max_prompt_length, take the row out, or set overlong_prompts to 'truncate_left' or 'filter'",
    ):
        check(ROWS, max_prompt_length=8, overlong="error")


def test_cut_prompts_are_counted_once_and_the_dataset_stays_as_it_is(check, monkeypatch):
    left, said = check(ROWS, max_prompt_length=2)
    assert left is ROWS
    assert len(said) == 1 and "of 5 prompts looked at, 3 have more than max_prompt_length=2 tokens" in said[0]
    monkeypatch.setattr(module, "ROWS_CHECKED", 2)
    assert "of 2 prompts looked at, 2 have more" in check(ROWS, max_prompt_length=2)[1][0]


def test_a_stream_is_judged_by_its_first_row_and_handed_back(check):
    stream = Dataset.from_list(ROWS).to_iterable_dataset()
    assert check(stream) == (stream, [])
    assert check(stream, max_prompt_length=2, overlong="filter") == (stream, [])  # filtered where it is read
    with pytest.raises(ValueError, match="row 0 of train_dataset: the prompt has 3 tokens, more than max_prompt_len"):
        check(stream, max_prompt_length=2, overlong="error")
    with pytest.raises(ValueError, match="row 0 of train_dataset: the prompt is empty"):
        check(Dataset.from_list([{"prompt": ""}]).to_iterable_dataset())


# --- what is no dataset, or several -----------------------------------------------------------------------------------

SPLITS = {"train": Dataset.from_list(ROWS), "test": Dataset.from_list(ROWS[:2])}
STREAMS = {name: split.to_iterable_dataset() for name, split in SPLITS.items()}
NO_DATASET = {
    "splits": (
        DatasetDict(SPLITS),
        r"is a DatasetDict, .*one of its splits \('train', 'test'\), e\.g\. dataset\['train'\]",
    ),
    "streams": (IterableDatasetDict(STREAMS), r"is a IterableDatasetDict, .*one of its splits \('train', 'test'\)"),
    "a dict of splits": (SPLITS, r"is a dict, .*one of its splits \('train', 'test'\)"),
    "a name": ("openai/gsm8k", r"is a str, .*load it first, e\.g\. datasets\.load_dataset\('openai/gsm8k', split="),
    "columns": ({"prompt": ["a", "b"]}, r"is a dict, .*give datasets\.Dataset\.from_dict\(columns\)"),
    "no rows": ([], "train_dataset is empty"),
    "an empty dataset": (Dataset.from_dict({"prompt": []}), "train_dataset is empty"),
    "an empty stream": (STREAMS["test"].take(0), "train_dataset is empty"),
    "a number": (3, "train_dataset is a int, which holds no rows"),
    "a generator": ((row for row in ROWS), "train_dataset is a generator, which can be read once only"),
}


@pytest.mark.parametrize("case", NO_DATASET)
def test_what_cannot_be_trained_on_is_refused_with_the_remedy(check, case):
    dataset, message = NO_DATASET[case]
    with pytest.raises(ValueError, match=message):
        check(dataset)


def test_a_data_frame_is_refused_with_the_remedy(check):
    pandas = pytest.importorskip("pandas")
    with pytest.raises(ValueError, match=r"is a DataFrame, .*give datasets\.Dataset\.from_pandas\(frame\)"):
        check(pandas.DataFrame(ROWS))


@pytest.fixture
def check_eval(tiny_tokenizer):
    """``check_eval(eval_dataset, **limit) -> (eval_dataset, [what was said])``."""

    def run(eval_dataset, **limit):
        said: list[str] = []
        limits = PromptLimit(tokenizer=tiny_tokenizer, **limit)
        return check_eval_dataset(eval_dataset, PromptRenderer(tiny_tokenizer), limits, said.append), said

    return run


@pytest.mark.parametrize("splits", [DatasetDict(SPLITS), IterableDatasetDict(STREAMS), SPLITS])
def test_evaluation_sets_may_be_several(check_eval, splits):
    sets, said = check_eval(splits)
    assert type(sets) is dict and list(sets) == ["train", "test"] and said == []
    assert all(sets[name] is splits[name] for name in sets)


def test_policies_hold_in_each_evaluation_set(check_eval):
    sets, said = check_eval(DatasetDict(SPLITS), max_prompt_length=3, overlong="filter")
    assert {name: len(rows) for name, rows in sets.items()} == {"train": 3, "test": 1}
    assert [line.split(":")[0] for line in said] == ["eval_dataset['train']", "eval_dataset['test']"]
    assert len(SPLITS["train"]) == 5  # the caller's are left alone
    with pytest.raises(ValueError, match=r"row 1 of eval_dataset\['train'\]: the prompt has 9 tokens"):
        check_eval(SPLITS, max_prompt_length=3, overlong="error")
    with pytest.raises(ValueError, match="row 1 of eval_dataset: the prompt has 9 tokens"):
        check_eval(ROWS, max_prompt_length=3, overlong="error")


def test_no_evaluation_set_is_none_and_an_empty_mapping_of_them_is_refused(check_eval):
    assert check_eval(None) == (None, [])
    with pytest.raises(ValueError, match="eval_dataset is an empty DatasetDict"):
        check_eval(DatasetDict())


# --- columns ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dataset", [ROWS, Dataset.from_list(ROWS), Dataset.from_list(ROWS).to_iterable_dataset()])
def test_a_reward_that_cannot_be_called_with_the_columns_is_refused_before_anything_is_drawn(dataset):
    def needs(completions, solution, **kwargs):
        return [0.0] * len(completions)

    def takes_no_more(prompts, completions):
        return [0.0] * len(completions)

    def fine(completions, answer, **kwargs):
        return [0.0] * len(completions)

    check_reward_columns(RewardSet([fine]), dataset)
    with pytest.raises(ValueError, match=r"'needs' cannot be called: missing .*'solution'.*columns \(answer\)"):
        check_reward_columns(RewardSet([needs]), dataset)
    with pytest.raises(ValueError, match=r"'takes_no_more' cannot be called: got an unexpected .*add \*\*kwargs"):
        check_reward_columns(RewardSet([fine, takes_no_more]), dataset)


def test_a_column_with_a_name_of_the_contract_is_not_asked_for():
    def reward(completions, trainer_state, **kwargs):
        return [0.0] * len(completions)

    check_reward_columns(RewardSet([reward]), [{"prompt": "a", "completions": "mine", "trainer_state": 3}])


def test_without_a_dataset_no_column_is_missed():
    def needs(completions, solution, **kwargs):
        return [0.0] * len(completions)

    check_reward_columns(RewardSet([needs]), None)


def test_the_first_row_is_read_without_using_anything_up():
    stream = Dataset.from_list(ROWS).to_iterable_dataset()
    assert first_row(ROWS) == first_row(stream) == first_row(stream) == ROWS[0]
    assert first_row([]) is None and first_row(STREAMS["test"].take(0)) is None
