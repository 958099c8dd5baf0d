from __future__ import annotations

import pytest
from datasets import Dataset
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from grpo_trainer.cli.build import (
    build_adapter,
    build_quantization,
    build_rewards,
    build_tokenizer,
    build_trainer,
)
from grpo_trainer.cli.errors import RecipeError
from grpo_trainer.cli.recipe import RecipeArguments, load_recipe
from grpo_trainer.rewards.base import reward_name
from grpo_trainer.rewards.maths import last_integer
from grpo_trainer.rewards.options import options_of

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
        ("reward_funcs: accuracy_rewrd", r"unknown reward 'accuracy_rewrd'\. Did you mean 'accuracy_reward'\?"),
        ("reward_funcs: {name: get_soft_overlong_punishment, kwargs: {x: 1}}", r"not x$"),
        ("reward_funcs: 'no.such:fn'", r"reward 'no\.such:fn' cannot be imported"),
        ("reward_funcs: {name: 'math:gcd', kwargs: {x: 1}}", r"takes no argument 'x'"),
    ],
)
def test_a_wrong_reward_is_an_error_of_the_recipe(recipe_file, text, message):
    with pytest.raises(RecipeError, match=message):
        build_rewards(load_recipe(recipe_file(text)))


def test_a_reward_model_comes_before_the_functions(recipe_file):
    recipe = load_recipe(
        recipe_file("reward_model_name_or_path: some/model\nreward_funcs: {name: last_integer, weight: 2}")
    )
    assert build_rewards(recipe) == ["some/model", last_integer]
    assert recipe.config().reward_weights == [1.0, 2.0]
    alone = load_recipe(recipe_file("reward_model_name_or_path: some/model"))
    assert build_rewards(alone) == ["some/model"] and alone.config().reward_weights is None


def test_rewards_may_be_written_as_trl_writes_them(recipe_file):
    dotted = f"{__name__}.count_words" if "." not in __name__ else "grpo_trainer.rewards.maths.last_integer"
    overlong, thinks, own = build_rewards(
        load_recipe(recipe_file(f"reward_funcs: [get_soft_overlong_punishment, think_format_reward, {dotted}]"))
    )
    # TRL's own command line binds a limit of 1280 tokens, the last 256 of which are punished
    assert overlong(completion_ids=[[0] * n for n in (1024, 1152, 1280, 1281)]) == [0, -0.5, -1, -1]
    assert thinks(completions=[[{"content": "<think>\na\n</think>\nb"}], [{"content": "b"}]]) == [1.0, 0.0]
    assert own([], answer=[]) == []


def test_a_reward_is_run_as_its_entry_says_and_its_function_stays_as_it_is(recipe_file):
    text = (
        "reward_funcs:\n  - last_integer\n  - {name: last_integer, isolation: process, time_limit: 2, on_error: none}"
    )
    text += (
        "\n  - {name: last_integer, isolation: process, rows_per_call: 4, on_timeout: -0.5, cache: true, group: false}"
    )
    plain, limited, spread = build_rewards(load_recipe(recipe_file(text)))
    assert plain is last_integer
    assert options_of(plain) == options_of(last_integer)
    assert options_of(limited) == options_of(
        last_integer, isolation="process", time_limit=2.0, memory_limit=None, on_error="none"
    )
    assert (options_of(spread).rows_per_call, options_of(spread).on_timeout, options_of(spread).cache) == (
        4,
        -0.5,
        True,
    )
    assert [reward_name(f) for f in (plain, limited, spread)] == ["last_integer"] * 3
    assert limited(["19"], answer=[19]) == [1.0]


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("isolation: proces", "proces"),
        ("time_limt: 2", "time_limt"),
        ("rows_per_call: 0, isolation: process", "rows_per_call is 0; use a number above 0"),
        ("isolation: inline, time_limit: 2", "set isolation to process or sandbox"),
        ("on_error: zero", "zero"),
    ],
)
def test_options_of_a_reward_that_are_not_legal_are_errors_of_the_recipe(recipe_file, entry, said):
    with pytest.raises(RecipeError, match=said):
        build_rewards(load_recipe(recipe_file(f"reward_funcs: {{name: last_integer, {entry}}}")))


def test_a_tokenizer_and_a_template_of_ones_own(recipe_file, tmp_path, tiny_tokenizer):
    tiny_tokenizer.save_pretrained(tmp_path / "tokenizer")
    config = load_recipe(recipe_file(CHECK)).config()
    assert build_tokenizer(RecipeArguments(model_name_or_path="m"), config) is None
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    (tmp_path / "chat.jinja").write_text(template)
    for given in (template, str(tmp_path / "chat.jinja")):
        own = RecipeArguments(tokenizer_name_or_path=str(tmp_path / "tokenizer"), chat_template=given)
        tokenizer = build_tokenizer(own, config)
        assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "[hi]"
    of_model = RecipeArguments(model_name_or_path=str(tmp_path / "tokenizer"), chat_template="x")
    assert build_tokenizer(of_model, config).chat_template == "x"


def test_the_trainer_gets_what_the_recipe_says_and_our_progress_only(recipe_file, fake_trainer):
    recipe = load_recipe(recipe_file(CHECK + "model_name_or_path: some/model\nreward_funcs: last_integer"))
    callbacks = [PrinterCallback(), ProgressCallback(), object()]
    rows = Dataset.from_list(ROWS)
    trainer = build_trainer(recipe, recipe.config(), rows, None, callbacks)
    assert trainer.model_name == "some/model"
    assert trainer.reward_funcs == [last_integer]
    assert trainer.train_dataset is rows and trainer.eval_dataset is None
    assert trainer.callbacks == callbacks[2:]
    assert trainer.kwargs == {"peft_config": None, "quantization_config": None, "processing_class": None}


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
    assert not (adapter.use_rslora or adapter.use_dora or adapter.modules_to_save or adapter.target_parameters)


def test_every_setting_of_the_adapter_reaches_it():
    adapter = build_adapter(
        RecipeArguments(
            use_peft=True,
            use_rslora=True,
            use_dora=True,
            lora_modules_to_save=["embed_tokens"],
            lora_target_parameters="experts.gate_up_proj",
        )
    )
    assert adapter.use_rslora and adapter.use_dora
    assert adapter.modules_to_save == ["embed_tokens"]
    assert set(adapter.target_parameters) == {"experts.gate_up_proj"}


@pytest.mark.parametrize(
    ("given", "target"),
    [("q_proj", {"q_proj"}), ("all-linear", "all-linear"), (r".*\.q_proj", r".*\.q_proj"), (["q_proj"], {"q_proj"})],
)
def test_one_module_is_a_name_unless_it_looks_like_a_pattern(given, target):
    assert build_adapter(RecipeArguments(use_peft=True, lora_target_modules=given)).target_modules == target


def test_quantisation_is_built_only_if_it_is_wanted():
    assert build_quantization(RecipeArguments()) is None
    four = build_quantization(
        RecipeArguments(
            load_in_4bit=True,
            use_peft=True,
            use_bnb_nested_quant=True,
            dtype="bfloat16",
            bnb_4bit_quant_storage="bfloat16",
        )
    )
    assert str(four.bnb_4bit_quant_storage) == "torch.bfloat16"
    assert (four.load_in_4bit, four.load_in_8bit, four.bnb_4bit_quant_type) == (True, False, "nf4")
    assert four.bnb_4bit_use_double_quant and str(four.bnb_4bit_compute_dtype) == "torch.bfloat16"
    assert build_quantization(RecipeArguments(load_in_8bit=True, use_peft=True, dtype="auto")).load_in_8bit
    with pytest.raises(RecipeError, match="load_in_4bit and load_in_8bit exclude each other"):
        build_quantization(RecipeArguments(load_in_4bit=True, load_in_8bit=True))
    with pytest.raises(RecipeError, match="load_in_4bit needs an adapter to train on top: set use_peft to true"):
        build_quantization(RecipeArguments(load_in_4bit=True))
