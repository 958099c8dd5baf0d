from __future__ import annotations

import json

import pytest
from datasets import Dataset, DatasetDict
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from grpo_trainer.cli.build import (
    as_prompts,
    build_adapter,
    build_datasets,
    build_quantization,
    build_rewards,
    build_trainer,
)
from grpo_trainer.cli.errors import RecipeError
from grpo_trainer.cli.recipe import RecipeArguments, load_recipe
from grpo_trainer.rewards.base import reward_name
from grpo_trainer.rewards.maths import last_integer

ROWS = [{"prompt": f"question {i}", "answer": i} for i in range(3)]
CHECK = "num_generations: 2\nper_device_train_batch_size: 2\n"


def count_words(completions, limit=1, **kwargs):
    return [float(len(c.split()) <= limit) for c in completions]


def test_rewards_are_resolved_with_their_keyword_arguments(recipe_file):
    name = f"{__name__}:count_words"
    try:
        __import__(__name__)
    except ImportError:  # pytest imports this file under a name of its own
        pytest.fail(f"{__name__} must be importable for this test")
    recipe = load_recipe(recipe_file(f"reward_funcs:\n  - last_integer\n  - {{name: '{name}', kwargs: {{limit: 2}}}}"))
    first, second = build_rewards(recipe)
    assert first is last_integer
    assert second(completions=["a b", "a b c"]) == [1.0, 0.0]
    assert reward_name(second) == "count_words"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1", r"names no reward: set reward_funcs, e\.g\. to \[last_integer\]"),
        ("reward_funcs: last_intger", r"unknown reward 'last_intger'\. Did you mean 'last_integer'\?"),
        ("reward_funcs: 'no.such:fn'", r"reward 'no\.such:fn' cannot be imported"),
        ("reward_funcs: {name: 'math:gcd', kwargs: {x: 1}}", r"takes no argument 'x'"),
    ],
)
def test_a_wrong_reward_is_an_error_of_the_recipe(recipe_file, text, message):
    with pytest.raises(RecipeError, match=message):
        build_rewards(load_recipe(recipe_file(text)))


def datasets_of(recipe_file, text: str):
    recipe = load_recipe(recipe_file(CHECK + text))
    return build_datasets(recipe, recipe.config())


def test_a_builtin_task_is_split_by_the_seed_of_the_run(recipe_file):
    train, evaluation = datasets_of(recipe_file, "dataset_name: builtin:sums\nseed: 3")
    assert evaluation is None  # nothing evaluates
    other, heldout = datasets_of(recipe_file, "dataset_name: builtin:sums\nseed: 4\neval_strategy: epoch")
    assert train.to_list() != other.to_list()
    assert len(heldout) == 64


def test_a_file_of_json_lines_is_read(recipe_file, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ROWS))
    train, _ = datasets_of(recipe_file, f"dataset_name: {path}")
    assert train.to_list() == ROWS


def test_a_saved_dataset_is_read(recipe_file, tmp_path):
    rows = Dataset.from_list(ROWS)
    rows.save_to_disk(tmp_path / "one")
    DatasetDict(train=rows, held=rows.select([2])).save_to_disk(tmp_path / "two")
    assert datasets_of(recipe_file, f"dataset_name: {tmp_path}/one")[0].to_list() == ROWS
    text = f"dataset_name: {tmp_path}/two\ndataset_test_split: held\neval_strategy: epoch"
    assert [len(part) for part in datasets_of(recipe_file, text)] == [3, 1]
    with pytest.raises(RecipeError, match=r"no split 'test'; its splits: train, held"):
        datasets_of(recipe_file, f"dataset_name: {tmp_path}/two\neval_strategy: epoch")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1", "names no dataset: set dataset_name, e.g. to builtin:sums"),
        ("dataset_name: builtin:sum", "unknown task 'builtin:sum'. Did you mean 'builtin:sums'?"),
        ("dataset_name: nowhere/rows.jsonl", "dataset_name=nowhere/rows.jsonl: there is no such file"),
        (
            "dataset_name: builtin:sums\ndataset_prompt_column: problem",
            "dataset_prompt_column='problem' is no column of builtin:sums; its columns: prompt, answer",
        ),
    ],
)
def test_a_wrong_dataset_is_an_error_of_the_recipe(recipe_file, text, message):
    with pytest.raises(RecipeError) as caught:
        datasets_of(recipe_file, text)
    assert message in str(caught.value)


def test_the_prompt_column_is_renamed_and_replaces_another_of_that_name():
    rows = Dataset.from_list([{"problem": "p", "prompt": "other", "answer": 1}])
    assert as_prompts(rows, RecipeArguments(dataset_prompt_column="problem")).to_list() == [
        {"prompt": "p", "answer": 1}
    ]


def test_a_system_prompt_makes_a_conversation_and_leaves_one_that_has_its_own():
    arguments = RecipeArguments(system_prompt="Be brief.")
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "p"}
    own = {"role": "system", "content": "Be long."}

    def prompts(*given) -> list:
        return as_prompts(Dataset.from_list([{"prompt": g} for g in given]), arguments)["prompt"][:]

    assert prompts("p") == [[system, user]]
    assert prompts([user], [own, user]) == [[system, user], [own, user]]


def test_the_trainer_gets_what_the_recipe_says_and_our_progress_only(recipe_file, fake_trainer):
    recipe = load_recipe(recipe_file(CHECK + "model_name_or_path: some/model\nreward_funcs: last_integer"))
    callbacks = [PrinterCallback(), ProgressCallback(), object()]
    rows = Dataset.from_list(ROWS)
    trainer = build_trainer(recipe, recipe.config(), rows, None, callbacks)
    assert trainer.model_name == "some/model"
    assert trainer.reward_funcs == [last_integer]
    assert trainer.train_dataset is rows and trainer.eval_dataset is None
    assert trainer.callbacks == callbacks[2:]
    assert trainer.kwargs == {"peft_config": None, "quantization_config": None}


def test_what_the_trainer_refuses_is_an_error_of_the_recipe(recipe_file, fake_trainer, monkeypatch):
    def refuse(self, **kwargs):
        raise ValueError("train_dataset is empty")

    monkeypatch.setattr(fake_trainer, "__init__", refuse)
    recipe = load_recipe(recipe_file(CHECK + "model_name_or_path: m\nreward_funcs: last_integer"))
    with pytest.raises(RecipeError, match=r"recipe\.yaml: train_dataset is empty"):
        build_trainer(recipe, recipe.config(), [])
    with pytest.raises(RecipeError, match="names no model: set model_name_or_path"):
        build_trainer(load_recipe(recipe_file(CHECK)), None, [])


def test_an_adapter_is_built_only_if_it_is_wanted():
    assert build_adapter(RecipeArguments(lora_r=4)) is None
    adapter = build_adapter(RecipeArguments(use_peft=True, lora_r=4, lora_alpha=8, lora_target_modules=["q_proj"]))
    assert (adapter.r, adapter.lora_alpha, adapter.lora_dropout) == (4, 8, 0.05)
    assert set(adapter.target_modules) == {"q_proj"}
    assert adapter.task_type == "CAUSAL_LM"


@pytest.mark.parametrize(
    ("given", "target"),
    [("q_proj", {"q_proj"}), ("all-linear", "all-linear"), (r".*\.q_proj", r".*\.q_proj"), (["q_proj"], {"q_proj"})],
)
def test_one_module_is_a_name_unless_it_looks_like_a_pattern(given, target):
    assert build_adapter(RecipeArguments(use_peft=True, lora_target_modules=given)).target_modules == target


def test_quantisation_is_built_only_if_it_is_wanted():
    assert build_quantization(RecipeArguments()) is None
    four = build_quantization(
        RecipeArguments(load_in_4bit=True, use_peft=True, use_bnb_nested_quant=True, dtype="bfloat16")
    )
    assert (four.load_in_4bit, four.load_in_8bit, four.bnb_4bit_quant_type) == (True, False, "nf4")
    assert four.bnb_4bit_use_double_quant and str(four.bnb_4bit_compute_dtype) == "torch.bfloat16"
    assert build_quantization(RecipeArguments(load_in_8bit=True, use_peft=True, dtype="auto")).load_in_8bit
    with pytest.raises(RecipeError, match="load_in_4bit and load_in_8bit exclude each other"):
        build_quantization(RecipeArguments(load_in_4bit=True, load_in_8bit=True))
    with pytest.raises(RecipeError, match="load_in_4bit needs an adapter to train on top: set use_peft to true"):
        build_quantization(RecipeArguments(load_in_4bit=True))
