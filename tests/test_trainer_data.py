"""Prompts on their way through the trainer: limits and their policies, evaluation sets, the user's tokenizer."""

from __future__ import annotations

import copy

import pytest
from datasets import Dataset, DatasetDict

from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.reports.first_prompt import HEAD
from grpo_trainer.types import Completions
from tests.helpers import EOS, tiny_llama, tiny_tokenizer

LENGTHS = [50, 3, 4, 60, 5, 6]


def plain(count):
    return "x" * count


def chat(count):
    return [{"role": "user", "content": "x" * count}]


class Listening:
    """Says one token to each prompt, and keeps the prompts."""

    def __init__(self):
        self.prompts = []

    def generate(self, prompts, num_samples, sampling, *, seed, row_ids=None, observer=None):
        self.prompts.extend(map(tuple, prompts))
        n = sum(num_samples)
        return Completions(ids=((5,),) * n, finished=(True,) * n)


def make(tmp_path, rows, tokenizer=None, eval_dataset=None, listening=True, **settings):
    config = GRPOConfig(
        str(tmp_path),
        **{
            "per_device_train_batch_size": 4,
            "num_generations": 2,
            "max_completion_length": 4,
            "max_steps": 3,
            "bf16": False,
            "use_cpu": True,
            "report_to": "none",
            "save_strategy": "no",
            "disable_tqdm": True,
            **settings,
        },
    )
    trainer = GRPOTrainer(
        tiny_llama(),
        lambda completions, size=None, **kwargs: [0.0 if n is None else float(n) for n in size],
        config,
        rows,
        eval_dataset=eval_dataset,
        processing_class=tokenizer or tiny_tokenizer(),
    )
    if listening:
        trainer.collector.generator = Listening()
    return trainer


def sized(kind, lengths=LENGTHS):
    return Dataset.from_list([{"prompt": kind(n), "size": n} for n in lengths])


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", [plain, chat])
@pytest.mark.parametrize("policy", ["filter", "truncate_left"])
def test_no_prompt_over_the_limit_reaches_generation(tmp_path, kind, policy, stream):
    rows = sized(kind)
    extra = 0 if kind is plain else len("<user\n>\n<assistant\n")  # the template's own; a marker is one token
    trainer = make(
        tmp_path,
        rows.to_iterable_dataset() if stream else rows,
        max_prompt_length=10 + extra,
        overlong_prompts=policy,
    )
    trainer.train()
    seen = sorted({len(p) - extra for p in trainer.collector.generator.prompts})
    assert seen == ([3, 4, 5, 6] if policy == "filter" else [3, 4, 5, 6, 10])


@pytest.mark.parametrize("kind", [plain, chat])
def test_a_prompt_over_the_limit_can_be_an_error_of_its_row(tmp_path, kind):
    with pytest.raises(ValueError, match=r"row 3 of train_dataset: the prompt has \d+ tokens, more than max_prompt_l"):
        make(tmp_path, sized(kind, [3, 4, 5, 60]), max_prompt_length=40, overlong_prompts="error")


def test_a_stream_names_the_row_that_is_too_long_when_it_is_met(tmp_path):
    rows = sized(plain, [3, 4, 50, 5]).to_iterable_dataset()
    settings = {"max_prompt_length": 10, "overlong_prompts": "error", "shuffle_dataset": False}
    with pytest.raises(ValueError, match="row 2 of train_dataset: the prompt has 50 tokens"):
        make(tmp_path, rows, **settings).train()


def test_a_filter_holds_for_every_kind_of_evaluation_set(tmp_path):
    held_out = sized(plain, [20, 2, 4])  # of which the first is too long: the mean size is 3
    sets = DatasetDict(rows=held_out)
    sets["stream"] = held_out.to_iterable_dataset()
    trainer = make(tmp_path, sized(plain), eval_dataset=dict(sets), max_prompt_length=10, overlong_prompts="filter")
    figures = trainer.evaluate()
    assert figures["eval_rows_reward"] == figures["eval_stream_reward"] == 3.0
    for given in (held_out, held_out.to_iterable_dataset(), list(held_out)):  # and for one that comes later
        assert trainer.evaluate(given)["eval_reward"] == 3.0
    assert max(map(len, trainer.collector.generator.prompts)) == 4


def test_other_policies_hold_in_evaluation_too(tmp_path):
    held_out = sized(plain, [2, 20])
    trainer = make(tmp_path, sized(plain), eval_dataset=held_out, max_prompt_length=10)
    assert trainer.evaluate()["eval_reward"] == 11.0
    assert max(map(len, trainer.collector.generator.prompts)) == 10
    settings = {"max_prompt_length": 10, "overlong_prompts": "error"}
    with pytest.raises(ValueError, match="row 1 of eval_dataset: the prompt has 20 tokens"):
        make(tmp_path, sized(plain, [3, 4]), eval_dataset=held_out, **settings)
    with pytest.raises(ValueError, match="row 1 of the evaluation set: the prompt has 20 tokens"):
        make(tmp_path, sized(plain, [3, 4]), **settings).evaluate(held_out)


def test_what_is_left_out_is_said_on_the_main_process(tmp_path, caplog):
    make(tmp_path, sized(plain), max_prompt_length=10, overlong_prompts="filter")
    said = [r.getMessage() for r in caplog.records if r.levelname == "WARNING" and "left out" in r.getMessage()]
    assert len(said) == 1 and "2 of 6 rows" in said[0]


# --- formats ----------------------------------------------------------------------------------------------------------


def test_a_format_that_changes_beyond_the_rows_that_are_checked_is_named_when_it_is_met(tmp_path, monkeypatch):
    monkeypatch.setattr("grpo_trainer.dataset.ROWS_CHECKED", 2)
    rows = [{"prompt": plain(n), "size": n} for n in (3, 4)] + [{"prompt": chat(n), "size": n} for n in (5, 6)]
    trainer = make(tmp_path, rows, shuffle_dataset=False)
    with pytest.raises(
        ValueError, match=r"strings \(row 0 of train_dataset\) and lists of messages \(row 2 of train_d"
    ):
        trainer.train()


# --- the first prompt -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("log_completions", [False, True])
def test_the_first_prompt_is_shown_once_as_the_model_reads_it(tmp_path, capsys, log_completions):
    trainer = make(tmp_path, sized(chat, [3] * 6), log_completions=log_completions)
    trainer.train()
    trainer.train()
    out = capsys.readouterr().out
    assert out.count(HEAD) == 1
    assert f"{HEAD}\n<|im_start|>user\nxxx<|im_end|>\n<|im_start|>assistant\n\n" in out


# --- the user's tokenizer ---------------------------------------------------------------------------------------------


def pads_right(tokenizer):
    tokenizer.padding_side = "right"


def lacks_padding(tokenizer):
    tokenizer.pad_token = None


def pads_with_end_of_sequence(tokenizer):
    tokenizer.pad_token = EOS


def snapshot(tokenizer):
    """Everything that it consists of."""
    attributes = {k: copy.deepcopy(v) for k, v in vars(tokenizer).items() if k != "_tokenizer"}
    return {**attributes, "backend": tokenizer.backend_tokenizer.to_str()}


@pytest.mark.parametrize("change", [pads_right, lacks_padding, pads_with_end_of_sequence])
@pytest.mark.parametrize("kind", [plain, chat])
def test_the_users_tokenizer_is_the_same_to_the_last_bit_afterwards(tmp_path, change, kind):
    tokenizer = tiny_tokenizer()
    change(tokenizer)
    before = snapshot(tokenizer)
    rows = sized(kind)
    trainer = make(tmp_path, rows, tokenizer, rows, listening=False, max_prompt_length=10, num_generations_eval=1)
    trainer.train()
    trainer.evaluate()
    assert snapshot(tokenizer) == before
    assert trainer.processing_class.padding_side == "left"
    assert trainer.processing_class.pad_token_id is not None
