from __future__ import annotations

import importlib
import json
import sys

import pytest
from datasets import Dataset, DatasetDict, IterableDataset

from grpo_trainer.cli.arguments import DatasetEntry, RecipeArguments
from grpo_trainer.cli.data import as_prompts, build_datasets, columns_of, import_path, mapped, mixture, renamed
from grpo_trainer.cli.errors import RecipeError
from grpo_trainer.cli.recipe import load_recipe

ROWS = [{"prompt": f"question {i}", "answer": i} for i in range(3)]
CHECK = "num_generations: 2\nper_device_train_batch_size: 2\n"


def double(row):
    return {"answer": 2 * row["answer"], "from_map": row["prompt"].upper()}


def fail_on_one(row):
    return {"answer": 1 // (1 - row["answer"])}


def count(row):
    return row["answer"]


def datasets_of(recipe_file, text: str, said=None):
    recipe = load_recipe(recipe_file(CHECK + text))
    return build_datasets(recipe, recipe.config(), *([] if said is None else [said.append]))


def write(tmp_path, rows=ROWS, name: str = "rows.jsonl") -> str:
    path = tmp_path / name
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def test_a_builtin_task_is_split_by_the_seed_of_the_run(recipe_file):
    train, evaluation = datasets_of(recipe_file, "dataset_name: builtin:sums\nseed: 3")
    assert evaluation is None  # nothing evaluates
    other, heldout = datasets_of(recipe_file, "dataset_name: builtin:sums\nseed: 4\neval_strategy: epoch")
    assert train.to_list() != other.to_list()
    assert len(heldout) == 64


def test_a_file_of_json_lines_is_read(recipe_file, tmp_path):
    said: list[str] = []
    train, _ = datasets_of(recipe_file, f"dataset_name: {write(tmp_path)}\ndataset_config: main", said)
    assert train.to_list() == ROWS
    assert said == ["dataset_config=main is left out: files have no configurations"]


def test_a_saved_dataset_is_read(recipe_file, tmp_path):
    rows = Dataset.from_list(ROWS)
    rows.save_to_disk(tmp_path / "one")
    DatasetDict(train=rows, held=rows.select([2])).save_to_disk(tmp_path / "two")
    assert datasets_of(recipe_file, f"dataset_name: {tmp_path}/one")[0].to_list() == ROWS
    text = f"dataset_name: {tmp_path}/two\ndataset_test_split: held\neval_strategy: epoch"
    assert [len(part) for part in datasets_of(recipe_file, text)] == [3, 1]
    with pytest.raises(RecipeError, match=r"no split 'test'\. Its splits: train, held"):
        datasets_of(recipe_file, f"dataset_name: {tmp_path}/two\neval_strategy: epoch")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1", "names no dataset: set dataset_name, e.g. to builtin:sums"),
        ("dataset_name: builtin:sum", "unknown task 'builtin:sum'. Did you mean 'builtin:sums'?"),
        ("dataset_name: nowhere/rows.jsonl", "dataset_name=nowhere/rows.jsonl: there is no such file"),
        (
            "dataset_name: builtin:sums\ndataset_prompt_column: promt",
            "dataset_prompt_column='promt' is no column of builtin:sums. Did you mean 'prompt'? "
            "Its columns: prompt, answer",
        ),
        ("dataset_name: a\ndatasets: [{path: b}]", "dataset_name=a and datasets are both set"),
        ("datasets: [{path: builtin:sums}]\neval_strategy: epoch", "set test_split_size, or eval_strategy: no"),
        ("datasets: [{path: builtin:sums}, {path: x.jsonl}]", "datasets[1] (x.jsonl): there is no such file"),
        ("dataset_name: builtin:sums\ndataset_map_fn: no_such_module:f", "dataset_map_fn 'no_such_module:f' cannot be"),
        (
            "dataset_name: builtin:sums\ndataset_streaming: true\ntest_split_size: 8",
            "test_split_size=8 needs the number of rows",
        ),
        (
            "dataset_name: builtin:sums\ndataset_column_mapping: {question: prompt}",
            "dataset_column_mapping: there is no column 'question'. Its columns: prompt, answer",
        ),
    ],
)
def test_wrong_data_are_an_error_of_the_recipe(recipe_file, text, message):
    with pytest.raises(RecipeError) as caught:
        datasets_of(recipe_file, text)
    assert message in str(caught.value)


@pytest.mark.parametrize("streaming", [False, True])
def test_the_prompt_column_is_renamed_and_replaces_another_of_that_name(streaming):
    rows = Dataset.from_list([{"problem": "p", "prompt": "other", "answer": 1}])
    rows = rows.to_iterable_dataset() if streaming else rows
    assert list(as_prompts(rows, RecipeArguments(dataset_prompt_column="problem"))) == [{"prompt": "p", "answer": 1}]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_system_prompt_makes_a_conversation_and_leaves_one_that_has_its_own(streaming):
    arguments = RecipeArguments(system_prompt="Be brief.")
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "p"}
    own = {"role": "system", "content": "Be long."}

    def prompts(*given) -> list:
        rows = Dataset.from_list([{"prompt": g} for g in given])
        return [row["prompt"] for row in as_prompts(rows.to_iterable_dataset() if streaming else rows, arguments)]

    assert prompts("p") == [[system, user]]
    assert prompts([user], [own, user]) == [[system, user], [own, user]]
    for bad in ("", None):
        with pytest.raises(ValueError, match=r"row 1 has the prompt (''|None); it must be a text or messages"):
            prompts("p", bad)


def test_a_function_maps_each_row_before_anything_is_renamed(recipe_file, tmp_path):
    text = (
        f"dataset_name: {write(tmp_path)}\ndataset_map_fn: {__name__}:double\ndataset_prompt_column: from_map\n"
        "dataset_column_mapping: {answer: solution}\nmax_steps: 1\n"
    )
    expected = [{"prompt": f"QUESTION {i}", "solution": 2 * i} for i in range(3)]
    train, _ = datasets_of(recipe_file, text)
    assert train.to_list() == expected
    stream, _ = datasets_of(recipe_file, text + "dataset_streaming: true")
    assert isinstance(stream, IterableDataset) and list(stream) == expected == list(stream)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_function_that_fails_is_told_with_its_row(streaming):
    rows = Dataset.from_list(ROWS)
    rows = rows.to_iterable_dataset() if streaming else rows
    with pytest.raises(ValueError, match=r"fn=\S+:fail_on_one failed on row 1: ZeroDivisionError: "):
        list(mapped(rows, f"{__name__}:fail_on_one", "fn"))
    with pytest.raises(ValueError, match=r"fn=\S+:count returned a int for row 0; return a dict of columns"):
        list(mapped(rows, f"{__name__}:count", "fn"))


def test_a_function_is_called_anew_when_it_does_something_else_by_now(recipe_file, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # what was compiled this second may be taken for the new text
    module, text = tmp_path / "edited_module.py", f"dataset_name: {write(tmp_path)}\ndataset_map_fn: edited_module:f"
    seen = []
    for factor in (2, -1):
        module.write_text(f"def f(row):\n    return {{'answer': {factor} * row['answer']}}\n")
        sys.modules.pop("edited_module", None)
        importlib.invalidate_caches()
        seen.append(datasets_of(recipe_file, text)[0]["answer"][:])
    assert seen == [[0, 2, 4], [0, -1, -2]]


def test_columns_are_renamed_and_may_swap_their_names():
    rows = Dataset.from_list([{"question": "q", "answer": "a", "prompt": "p"}])
    swapped = renamed(rows, {"question": "prompt", "prompt": "question"}, "key")
    assert swapped.to_list() == [{"prompt": "q", "answer": "a", "question": "p"}]
    assert renamed(rows, {"question": "question"}, "key") is rows
    with pytest.raises(ValueError, match=r"key: 'question' cannot be called 'prompt', since there is a column of that"):
        renamed(rows, {"question": "prompt"}, "key")
    with pytest.raises(ValueError, match=r"key: 'answer' cannot be called 'x'"):
        renamed(rows, {"question": "x", "answer": "x"}, "key")
    with pytest.raises(ValueError, match=r"no column 'questoin'\. Did you mean 'question'\?"):
        renamed(rows, {"questoin": "x"}, "key")


def test_rows_are_held_out_by_the_seed(recipe_file, tmp_path):
    rows = [{"prompt": f"question {i}", "answer": i} for i in range(40)]
    text = f"dataset_name: {write(tmp_path, rows)}\neval_strategy: epoch\ntest_split_size: "
    train, heldout = datasets_of(recipe_file, text + "8")
    assert (len(train), len(heldout)) == (32, 8)
    assert sorted([*train["answer"], *heldout["answer"]]) == list(range(40))
    again = datasets_of(recipe_file, text + "0.2")
    assert again[1]["answer"][:] == heldout["answer"][:]
    assert datasets_of(recipe_file, text + "8\nseed: 7")[1]["answer"][:] != heldout["answer"][:]
    not_evaluated = datasets_of(recipe_file, text.replace("epoch", "no") + "8")
    assert not_evaluated[0]["answer"][:] == train["answer"][:] and not_evaluated[1] is None


def entries(tmp_path, *sizes: int, **more) -> list[DatasetEntry]:
    """Datasets whose answers begin at 0, 100, 200, ..."""
    paths = [
        write(tmp_path, [{"prompt": "p", "answer": 100 * i + j, f"own{i}": 1} for j in range(size)], f"{i}.jsonl")
        for i, size in enumerate(sizes)
    ]
    return [
        DatasetEntry(path=p, columns=["prompt", "answer"], **{k: v[i] for k, v in more.items()})
        for i, p in enumerate(paths)
    ]


def answers(entries, streaming: bool = False, seed: int = 0) -> list[int]:
    return [row["answer"] for row in mixture(entries, seed=seed, streaming=streaming)]


@pytest.mark.parametrize("streaming", [False, True])
def test_datasets_are_mixed_one_after_the_other(tmp_path, streaming):
    mixed = mixture(entries(tmp_path, 2, 3), seed=0, streaming=streaming)
    assert [row["answer"] for row in mixed] == [0, 1, 100, 101, 102]
    assert columns_of(mixed) == ["prompt", "answer"]


def test_fractions_are_shares_of_the_mixture_and_no_row_comes_twice(tmp_path):
    # 10 and 4 rows as 1 : 1 make 4 and 4; as 3 : 1 the ten rows are the limit: 10 and 10 / 3
    assert answers(entries(tmp_path, 10, 4, fraction=[0.5, 0.5])) == [0, 1, 2, 3, 100, 101, 102, 103]
    assert answers(entries(tmp_path, 10, 4, fraction=[3, 1])) == [*range(10), 100, 101, 102]
    with pytest.raises(ValueError, match=r"fraction is \[0\.5, None\]; give it for all of them, above 0, or for none"):
        answers(entries(tmp_path, 2, 2, fraction=[0.5, None]))
    with pytest.raises(ValueError, match=r"fraction and weight need the number of rows"):
        answers(entries(tmp_path, 2, 2, fraction=[0.5, 0.5]), streaming=True)


def test_the_mixture_is_trls(tmp_path):
    from trl import DatasetMixtureConfig, get_dataset
    from trl.scripts.utils import DatasetConfig

    ours = entries(tmp_path, 30, 7, fraction=[0.7, 0.3])
    theirs = [DatasetConfig(path="json", data_files=e.path, columns=e.columns, fraction=e.fraction) for e in ours]
    assert answers(ours) == get_dataset(DatasetMixtureConfig(datasets=theirs))["train"]["answer"][:]


def test_a_weight_is_a_share_of_a_datasets_own_rows(tmp_path):
    mixed = answers(entries(tmp_path, 40, 2, weight=[0.25, None]))
    assert len(mixed) == 12 and len(set(mixed)) == 12 and mixed[10:] == [100, 101]
    assert mixed[:10] != list(range(10))  # drawn
    assert answers(entries(tmp_path, 40, 2, weight=[0.25, None])) == mixed
    assert answers(entries(tmp_path, 40, 2, weight=[0.25, None]), seed=1) != mixed
    with pytest.raises(ValueError, match=r"datasets\[0\] \(.*\): weight=1\.5 must be in \(0, 1\]"):
        answers(entries(tmp_path, 2, weight=[1.5]))


def test_each_dataset_of_a_mixture_is_mapped_and_renamed_by_itself(recipe_file, tmp_path):
    first = write(tmp_path, [{"question": "a", "answer": 1}], "a.jsonl")
    second = write(tmp_path, [{"prompt": "b", "answer": 2}], "b.jsonl")
    train, _ = datasets_of(
        recipe_file,
        f"datasets:\n- {{path: {first}, column_mapping: {{question: prompt}}}}\n"
        f"- {{path: {second}, map_fn: '{__name__}:double', columns: [prompt, answer]}}",
    )
    assert train.to_list() == [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 4}]


def test_datasets_that_do_not_fit_each_other_are_refused(tmp_path):
    first = write(tmp_path, [{"prompt": "a"}], "a.jsonl")
    second = write(tmp_path, [{"prompt": [{"role": "user", "content": "b"}]}], "b.jsonl")
    with pytest.raises(ValueError, match="their columns do not fit each other; keep some with columns"):
        mixture([DatasetEntry(path=first), DatasetEntry(path=second)], seed=0, streaming=False)
    with pytest.raises(ValueError, match=r"columns: there is no column 'answer'\. Its columns: prompt"):
        mixture([DatasetEntry(path=first, columns=["answer"])], seed=0, streaming=False)


def test_a_key_of_a_dataset_that_nobody_knows_is_refused(recipe_file):
    with pytest.raises(RecipeError, match=r"datasets: .*\(at 0\.spilt: unexpected keyword argument\)"):
        load_recipe(recipe_file("datasets: [{path: a, spilt: train}]"))


def test_import_paths_may_be_written_with_dots():
    assert import_path("pkg.mod.fn") == import_path("pkg.mod:fn") == "pkg.mod:fn"
    assert import_path("last_integer") == "last_integer"
