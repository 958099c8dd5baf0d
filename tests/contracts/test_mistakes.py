"""Mistakes that users make, and the word that they get: which field, which numbers, what to do instead.

Each case is made the way a user makes it. Whatever a message says must be in one sentence or two, and no error may
come from deep inside a library without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
import trl
from datasets import Dataset, DatasetDict
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import BitsAndBytesConfig, T5Config, T5ForConditionalGeneration

from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.cli import main
from tests.helpers import tiny_llama, tiny_tokenizer

ROWS = [{"prompt": text, "answer": 1} for text in ("one", "two", "three", "four")]


def reward(completions, **kwargs):
    return [float(len(c)) for c in completions]


def config(**settings: Any) -> GRPOConfig:
    common = {"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "max_completion_length": 4}
    small = {"per_device_train_batch_size": 4, "num_generations": 2, "max_steps": 1, "disable_tqdm": True}
    return GRPOConfig("out", **{**common, **small, **settings})


def trainer(rewards: Any = reward, rows: Any = None, model: Any = None, **arguments: Any) -> GRPOTrainer:
    settings = arguments.pop("settings", {})
    arguments = {"processing_class": tiny_tokenizer(), "args": config(**settings), **arguments}
    data = Dataset.from_list(ROWS) if rows is None else rows
    return GRPOTrainer(tiny_llama() if model is None else model, rewards, train_dataset=data, **arguments)


def without_template() -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    return tokenizer


def scoring(values: Any) -> Callable[[], Any]:
    return lambda: trainer(lambda **kwargs: values).train()


def raising(**kwargs):
    raise KeyError("answers")


def t5() -> Any:
    small = {"vocab_size": 256, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**small))


CHAT = [{"role": "user", "content": "hi"}]

# what was done: (how, what the message must hold)
MISTAKES: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "a group of one": (lambda: config(num_generations=1), ["num_generations=1", "at least 2"]),
    "a batch that is no whole number of groups": (
        lambda: config(per_device_train_batch_size=4, num_generations=3),
        ["4 completions", "num_generations=3", "steps_per_generation=3", "[2, 4]"],
    ),
    "two numbers for one thing": (
        lambda: config(generation_batch_size=8, steps_per_generation=4),
        ["generation_batch_size=8", "steps_per_generation=4", "give one"],
    ),
    "a loss that is misspelt": (lambda: config(loss_type="drgrpo"), ["loss_type 'drgrpo'", "dr_grpo", "dapo"]),
    "greedy sampling": (lambda: config(temperature=0.0), ["temperature=0.0", "above 0"]),
    "a number as text": (lambda: config(beta="0.1"), ["beta='0.1'", "number", "str"]),
    "half a completion": (lambda: config(num_generations=8.5), ["num_generations=8.5", "whole number"]),
    "a negative weight of the KL": (lambda: config(beta=-0.1), ["beta=-0.1", "0 or above"]),
    "a two-sided clip inside the clip": (lambda: config(delta=1.1), ["delta=1.1", "1.2"]),
    "no limit of completions": (lambda: config(max_completion_length=None), ["max_completion_length", "None"]),
    "an engine that is not there": (lambda: config(use_vllm=True), ["use_vllm=True", "not supported yet", "False"]),
    "a batch size that looks for itself": (
        lambda: config(auto_find_batch_size=True),
        ["auto_find_batch_size=True", "per_device_train_batch_size"],
    ),
    "unused columns taken away": (
        lambda: config(remove_unused_columns=True),
        ["remove_unused_columns=True", "reward functions", "False"],
    ),
    "the configuration of the other library": (
        lambda: trainer(args=trl.GRPOConfig("out", use_cpu=True, bf16=False)),
        ["args must be a grpo_trainer.GRPOConfig", "trl", "import GRPOConfig"],
    ),
    "the wrong column": (
        lambda: trainer(rows=Dataset.from_list([{"question": "one"}])),
        ["row 0 of train_dataset", "'prompt'", "question"],
    ),
    "an empty prompt": (
        lambda: trainer(rows=Dataset.from_list([*ROWS, {"prompt": "", "answer": 0}])),
        ["row 4 of train_dataset", "empty"],
    ),
    "a prompt that is a number": (
        lambda: trainer(rows=Dataset.from_list([{"prompt": 7}] * 4)),
        ["row 0 of train_dataset", "string", "int"],
    ),
    "texts and messages in one dataset": (
        lambda: trainer(rows=[{"prompt": "one"}, {"prompt": CHAT}] * 2),
        ["row 0", "row 1", "one form"],
    ),
    "messages for a model without a chat template": (
        lambda: trainer(rows=[{"prompt": CHAT}] * 4, processing_class=without_template()),
        ["row 0", "no chat template", "tokenizer.chat_template"],
    ),
    "a prompt that fills the context": (
        lambda: trainer(rows=[{"prompt": "x" * 300}] * 4),
        ["row 0", "300 tokens", "max_completion_length=4", "256"],
    ),
    "all splits at once": (
        lambda: trainer(rows=DatasetDict(train=Dataset.from_list(ROWS))),
        ["train_dataset is a DatasetDict", "train"],
    ),
    "pictures": (
        lambda: trainer(rows=[{"prompt": "one", "image": 3}] * 4),
        ["'image'", "not supported", "remove_columns"],
    ),
    "a data frame": (lambda: trainer(rows=pd.DataFrame(ROWS)), ["DataFrame", "Dataset.from_pandas"]),
    "no rows": (lambda: trainer(rows=Dataset.from_list(ROWS).select([])), ["train_dataset is empty"]),
    "fewer rows than one rollout needs": (
        lambda: trainer(rows=ROWS[:1]).train(),
        ["1 rows", "2 prompts", "4 completions", "num_generations=2"],
    ),
    "a stream without a number of steps": (
        lambda: trainer(rows=Dataset.from_list(ROWS).to_iterable_dataset(), settings={"max_steps": -1}),
        ["stream", "num_train_epochs", "max_steps"],
    ),
    "a generator": (lambda: trainer(rows=(row for row in ROWS)), ["generator", "once", "IterableDataset"]),
    "no reward": (lambda: trainer(rewards=None), ["reward_funcs is missing"]),
    "a reward that is no function": (lambda: trainer(rewards=[3]), ["reward_funcs", "3 (int)", "not callable"]),
    "a reward that takes too little": (
        lambda: trainer(lambda completions: [0.0] * len(completions)),
        ["'lambda'", "**kwargs", "prompts, completions"],
    ),
    "a reward that asks for a column that is not there": (
        lambda: trainer(lambda completions, solution, **kwargs: [0.0]),
        ["'lambda'", "solution", "answer"],
    ),
    "too few weights": (
        lambda: trainer([reward, reward], settings={"reward_weights": [1.0]}),
        ["reward_weights has 1", "2 reward functions"],
    ),
    "rewards for some of the completions": (scoring([1.0]), ["'lambda'", "1 values", "4 completions"]),
    "rewards that are text": (scoring(["good"] * 4), ["'lambda'", "'good'", "not a number", "row 0", "None"]),
    "a reward that is not a number": (scoring([float("nan")] * 4), ["'lambda'", "nan", "not finite", "row 0"]),
    "a reward that raises": (lambda: trainer(raising).train(), ["answers", "reward function 'raising'"]),
    "a model that does not exist": (
        lambda: trainer(model="./no/such/model", processing_class=None),
        ["'./no/such/model'", "no such folder", "hub name"],
    ),
    "4 bits without an adapter": (
        lambda: trainer(model="builtin:x", quantization_config=BitsAndBytesConfig(load_in_4bit=True)),
        ["peft_config=LoraConfig", "quantization"],
    ),
    "an adapter on an adapter": (
        lambda: trainer(
            model=get_peft_model(tiny_llama(), LoraConfig(target_modules=["q_proj"])), peft_config=LoraConfig()
        ),
        ["adapter already", "merge_and_unload"],
    ),
    "an adapter of learned tokens": (
        lambda: trainer(peft_config=PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)),
        ["PromptTuningConfig", "LoraConfig"],
    ),
    "an encoder-decoder": (lambda: trainer(model=t5()), ["T5ForConditionalGeneration", "decoder-only"]),
    "something else than a tokenizer": (lambda: trainer(processing_class=3), ["processing_class", "int", "tokenizer"]),
    "a model with nothing to train": (
        lambda: trainer(model=tiny_llama().requires_grad_(False)),
        ["no parameter", "requires_grad_(True)"],
    ),
    "going on from a folder that is no checkpoint": (
        lambda: trainer().train(resume_from_checkpoint="tests"),
        ["resume_from_checkpoint='tests'", "no checkpoint", "trainer_state.json"],
    ),
    "going on from nowhere": (
        lambda: trainer().train(resume_from_checkpoint="nowhere"),
        ["resume_from_checkpoint='nowhere'", "no such folder"],
    ),
    "evaluation without a dataset for it": (lambda: trainer().evaluate(), ["eval_dataset", "none was given"]),
    "an argument for generation that is misspelt": (
        lambda: trainer(settings={"generation_kwargs": {"top_kk": 3}}),
        ["generation_kwargs", "'top_kk'", "top_k"],
    ),
    "tools": (lambda: trainer(tools=[reward]), ["tools", "not supported yet"]),
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    (tmp_path / "tests").mkdir()
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_message_names_the_field_the_numbers_and_the_remedy(mistake):
    make, words = MISTAKES[mistake]
    with pytest.raises((ValueError, TypeError, OSError, KeyError)) as caught:
        make()
    message = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    for word in words:
        assert word in message, message
    assert len(message) < 700, message


# --- on the command line ---------------------------------------------------------------------------------------------

RECIPE = {
    "model_name_or_path": "builtin:smollm2-135m-instruct",
    "dataset_name": "builtin:sums",
    "reward_funcs": "last_integer",
    "output_dir": "out",
}

WRONG_RECIPES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a key that is misspelt": ({"learning_rat": 1e-6}, ["learning_rat", "learning_rate"]),
    "half a completion": ({"num_generations": 8.5}, ["num_generations", "8.5"]),
    "a reward that is misspelt": ({"reward_funcs": "last_intger"}, ["last_intger", "last_integer"]),
    "a reward in a module that is not there": ({"reward_funcs": "no_module:f"}, ["no_module"]),
    "a dataset that is not there": ({"dataset_name": "rows.jsonl"}, ["rows.jsonl", "no such file"]),
    "a column that is not there": ({"dataset_prompt_column": "question"}, ["question", "prompt"]),
    "4 bits without an adapter": ({"load_in_4bit": True}, ["load_in_4bit", "use_peft"]),
    "no model": ({"model_name_or_path": None}, ["model_name_or_path"]),
}


@pytest.mark.parametrize("mistake", WRONG_RECIPES)
def test_a_wrong_recipe_is_one_short_message_and_exit_code_2(mistake, tmp_path, capsys):
    changes, words = WRONG_RECIPES[mistake]
    lines = [f"{key}: {'null' if value is None else value}" for key, value in {**RECIPE, **changes}.items()]
    (tmp_path / "recipe.yaml").write_text("\n".join(lines))
    assert main(["train", "recipe.yaml"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and "Traceback" not in told
    for word in words:
        assert word in told, told


def test_the_list_is_long_enough():
    assert len(MISTAKES) + len(WRONG_RECIPES) >= 30
    assert all(len(words) for _, words in MISTAKES.values())
