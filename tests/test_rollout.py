from __future__ import annotations

import contextlib
import dataclasses
import math

import numpy as np
import pytest
import torch

from grpo_trainer.data import PromptLimit, PromptRenderer
from grpo_trainer.functional.advantages import group_center, group_zscore
from grpo_trainer.generation.hf import HFGenerator
from grpo_trainer.policy.scoring import completion_logprobs
from grpo_trainer.rewards.base import RewardError, RewardSet
from grpo_trainer.rollout import RolloutCollector
from grpo_trainer.types import Completions, SamplingParams
from tests import helpers

END = helpers.EOS_ID
NAN = math.nan
ROWS = [{"prompt": "ab", "answer": 1}, {"prompt": "abcde", "answer": 2}]
# Two groups of four, "x" and "y" being tokens; the second and the seventh are cut at the limit of 5, the last is empty.
TEXTS = ["x", "xxxxx", "xx", "xxx", "y", "yy", "yyyyy", ""]
FINISHED = [True, False, True, True, True, True, False, True]


class Fake:
    """Says what it is told to; a completion that finished gets an end-of-sequence token, unless it is empty."""

    def __init__(self, tokenizer, texts=TEXTS, finished=FINISHED) -> None:
        self.texts, self.finished = texts, finished
        self.encode = lambda text: tokenizer.convert_tokens_to_ids(list(text))
        self.calls: list = []

    def generate(self, prompts, num_samples, sampling, *, seed, row_ids=None, observer=None):
        self.calls.append((prompts, num_samples, sampling, seed))
        ids = [
            (*self.encode(text), *([END] if done and text else []))
            for text, done in zip(self.texts, self.finished, strict=True)
        ]
        return Completions(ids=tuple(ids), finished=tuple(self.finished))


def gives(*values, name="score"):
    def reward(completions, **kwargs):
        return list(values)

    reward.__name__ = name
    return reward


SCORES = [10, 8, 3, 1, 0, 0, 0, 0]  # the second group is constant


@pytest.fixture
def collector(tiny_tokenizer):
    """A collector of two groups of four; keyword arguments replace its parts."""
    model = helpers.tiny_llama()

    def build(*functions, texts=TEXTS, finished=FINISHED, weights=None, **parts) -> RolloutCollector:
        settings = {
            "renderer": PromptRenderer(tiny_tokenizer),
            "generator": Fake(tiny_tokenizer, texts, finished),
            "sampling": SamplingParams(max_new_tokens=5, eos_token_ids=(END,), pad_token_id=END, temperature=0.7),
            "rewards": RewardSet(functions or [gives(*SCORES)], weights),
            "advantage": group_zscore,
            "num_generations": 4,
            "policy": lambda: model,
        }
        return RolloutCollector(**{**settings, **parts})

    return build


def collect(built, rows=ROWS, num_samples=(4, 4)):
    return built.collect(rows, list(num_samples), seed=11)


def figures(built) -> dict[str, float]:
    return built.metrics.reduce()


# --- the batch --------------------------------------------------------------------------------------------------------


def test_the_batch_holds_what_was_drawn_and_what_it_earned(collector, tiny_tokenizer):
    built = collector()
    batch = collect(built).batch
    x, y = tiny_tokenizer.convert_tokens_to_ids(["x", "y"])
    assert [p.tolist() for p in batch.prompt_ids] == [
        tiny_tokenizer("ab")["input_ids"],
        tiny_tokenizer("abcde")["input_ids"],
    ]
    assert batch.prompt_of_row == (0, 0, 0, 0, 1, 1, 1, 1)
    assert batch.lengths == (2, 5, 3, 4, 2, 3, 5, 0)
    assert batch.completion_ids.tolist() == [
        [x, END, 0, 0, 0],
        [x] * 5,
        [x, x, END, 0, 0],
        [x, x, x, END, 0],
        [y, END, 0, 0, 0],
        [y, y, END, 0, 0],
        [y] * 5,
        [0] * 5,
    ]
    # every token counts, the end included, although here the padding has the same id
    assert batch.mask.sum(dim=1).tolist() == [2, 5, 3, 4, 2, 3, 5, 0]
    assert batch.mask[2].tolist() == [True, True, True, False, False]
    # 10, 8, 3, 1: mean 5.5, deviation 4.20317
    far, near = 4.5 / 4.20327, 2.5 / 4.20327
    assert batch.advantages.tolist() == pytest.approx([far, near, -near, -far, 0, 0, 0, 0], abs=1e-5)
    assert batch.advantages.dtype == torch.float32 and not batch.advantages[4:].any()
    assert batch.old_logprobs is None and batch.ref_logprobs is None


def test_the_generator_is_asked_for_the_rendered_prompts(collector, tiny_tokenizer):
    built = collector()
    collect(built)
    ((prompts, num_samples, sampling, seed),) = built.generator.calls
    assert [list(p) for p in prompts] == [tiny_tokenizer("ab")["input_ids"], tiny_tokenizer("abcde")["input_ids"]]
    assert (list(num_samples), sampling, seed) == ([4, 4], built.sampling, 11)


def test_truncated_completions_are_out_of_the_loss_but_stay_in_their_groups_statistics(collector):
    batch = collect(collector(mask_truncated=True)).batch
    assert batch.mask.sum(dim=1).tolist() == [2, 0, 3, 4, 2, 3, 0, 0]
    assert batch.lengths == (2, 5, 3, 4, 2, 3, 5, 0)
    # 8 was truncated; the mean is still that of all four, as in TRL
    assert batch.advantages[:4].tolist() == pytest.approx([1.0706, 0.5948, -0.5948, -1.0706], abs=5e-5)


def test_tokens_of_all_completions_are_counted_with_their_prompt(collector):
    # prompts 4 * 2 + 4 * 5, completions 2 + 5 + 3 + 4 + 2 + 3 + 5 + 0
    assert collect(collector()).num_tokens == 28 + 24


def test_a_rollout_of_empty_completions_is_legal(collector):
    built = collector(texts=[""] * 8, finished=[True] * 8, keep_old_logprobs=True)
    batch = collect(built).batch
    assert batch.completion_ids.shape == batch.mask.shape == batch.old_logprobs.shape == (8, 0)
    assert all(math.isfinite(v) for v in figures(built).values())


# --- old and reference log-probs --------------------------------------------------------------------------------------


class Frozen:
    def __init__(self, model) -> None:
        self.model = model

    @contextlib.contextmanager
    def activate(self):
        yield self.model


@pytest.mark.parametrize("size", [1, 3, 8, 100])
def test_old_and_reference_log_probs_are_those_of_scoring_alone(collector, size):
    policy, reference = helpers.tiny_gpt2(seed=1), helpers.tiny_gpt2(seed=2)
    built = collector(
        policy=lambda: policy,
        reference=Frozen(reference),
        keep_old_logprobs=True,
        parts=lambda batch, rows: [rows[i : i + size] for i in range(0, len(rows), size)],
    )
    batch = collect(built).batch
    for model, got in ((policy, batch.old_logprobs), (reference, batch.ref_logprobs)):
        expected = completion_logprobs(model, batch, temperature=0.7).logprobs  # the temperature of the sampling
        assert torch.allclose(got, expected, atol=1e-5)
        assert not got.requires_grad and got.dtype == torch.float32
        assert not got[~batch.mask].any()


def test_old_log_probs_are_taken_without_dropout_and_the_modes_are_put_back(collector):
    policy = helpers.tiny_gpt2(resid_pdrop=0.5, embd_pdrop=0.5).train()
    policy.lm_head.eval()
    modes = [m.training for m in policy.modules()]
    batch = collect(collector(policy=lambda: policy, keep_old_logprobs=True)).batch
    assert [m.training for m in policy.modules()] == modes
    quiet = completion_logprobs(policy.eval(), batch, temperature=0.7).logprobs
    assert torch.allclose(batch.old_logprobs, quiet, atol=1e-5)


def test_log_probs_are_taken_in_the_precision_of_the_context(collector):
    built = collector(keep_old_logprobs=True, autocast=lambda: torch.autocast("cpu", torch.bfloat16))
    batch = collect(built).batch
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = completion_logprobs(built.policy(), batch, temperature=0.7).logprobs
    assert torch.equal(batch.old_logprobs, expected)
    assert not torch.equal(completion_logprobs(built.policy(), batch, temperature=0.7).logprobs, expected)


# --- rewards and texts ------------------------------------------------------------------------------------------------


def test_each_completion_meets_its_own_row_in_the_reward(collector):
    seen = {}

    def reward(prompts, completions, completion_ids, answer, trainer_state, **kwargs):
        seen.update(locals())
        return SCORES

    collect(collector(reward, trainer_state=lambda: "step 3"))
    assert seen["prompts"] == ["ab"] * 4 + ["abcde"] * 4
    assert seen["answer"] == [1] * 4 + [2] * 4
    assert seen["completions"] == TEXTS  # special tokens are left out of the text, whether an end came or not
    assert [len(ids) for ids in seen["completion_ids"]] == [2, 5, 3, 4, 2, 3, 5, 0]  # and kept among the ids
    assert seen["completion_ids"][0][-1] == END
    assert seen["trainer_state"] == "step 3"


def test_conversational_rows_have_conversational_completions(collector):
    seen = {}
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in ("ab", "abcde")]
    collect(collector(lambda completions, prompts, **kwargs: seen.update(locals()) or SCORES), rows)
    assert seen["completions"] == [[{"role": "assistant", "content": text}] for text in TEXTS]
    assert seen["prompts"][4] == [{"role": "user", "content": "abcde"}]


def test_columns_reach_the_reward_as_they_stand_in_the_row(collector):
    seen = {}
    array = np.arange(3)
    columns = {
        "nested": {"a": None, "b": [{"c": None}, 1]},  # keys that hold None are left out of prompts only
        "missing": None,
        "array": array,
        "scalar": np.float32(0.1),
        "ids": [5, 6],
    }
    rows = [{"prompt": "ab", **columns}, {"prompt": "cd", **dict.fromkeys(columns)}]
    collect(collector(lambda completions, **kwargs: seen.update(kwargs) or SCORES), rows)
    for name, value in columns.items():
        assert all(got is value for got in seen[name][:4]) and seen[name][4:] == [None] * 4
    assert columns["nested"] == {"a": None, "b": [{"c": None}, 1]} and array.tolist() == [0, 1, 2]


def test_special_tokens_are_left_out_of_the_text_and_can_be_read_from_the_ids(collector, tiny_tokenizer):
    class Marked:
        def generate(self, prompts, num_samples, sampling, *, seed, row_ids=None, observer=None):
            ids = (helpers.BOS_ID, *tiny_tokenizer.convert_tokens_to_ids(["x", "y"]), END)
            return Completions(ids=(ids,) * 8, finished=(True,) * 8)

    def marked(completions, completion_ids, **kwargs):
        assert set(completions) == {"xy"}
        return [float(tiny_tokenizer.decode(ids) == f"{helpers.BOS}xy{helpers.EOS}") for ids in completion_ids]

    built = collector(marked, generator=Marked())
    collect(built)
    assert figures(built)["rewards/marked/mean"] == 1.0


def test_a_completion_begins_where_the_prompt_ends_also_inside_an_opened_tag(collector, tiny_tokenizer):
    tiny_tokenizer.chat_template = helpers.CHAT_TEMPLATE + "{% if add_generation_prompt %}<think>{% endif %}"
    seen = {}
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in ("ab", "cd")]
    built = collector(lambda completions, **kwargs: seen.update(completions=completions) or SCORES)
    table = collect(built, rows).table
    assert all(prompt.endswith("assistant\n<think>") for prompt in table["prompt"])
    assert [c[0]["content"] for c in seen["completions"]] == TEXTS


def test_an_unscorable_completion_is_out_of_the_statistics_and_of_the_figures(collector):
    built = collector(gives(1, None, 3, 2, None, None, None, None))
    # 1, 3, 2: mean 2, deviation 1
    assert collect(built).batch.advantages.tolist() == pytest.approx([-0.9999, 0, 0.9999, 0, 0, 0, 0, 0], abs=1e-5)
    got = figures(built)
    assert got["reward"] == 2.0 and got["rewards/score/mean"] == 2.0
    assert got["reward_std"] == got["rewards/score/std"] == pytest.approx(1.0)
    assert got["frac_reward_zero_std"] == 0.5


def test_where_nothing_applies_there_is_no_credit_and_no_figure_of_it(collector):
    built = collector(gives(*[None] * 8), keep_old_logprobs=True)
    assert not collect(built).batch.advantages.any()
    got = figures(built)
    assert all(math.isfinite(v) for v in got.values())
    assert not {"reward", "reward_std", "rewards/score/mean", "rewards/score/std"} & set(got)
    assert got["frac_reward_zero_std"] == 1.0


def test_the_better_completion_gets_the_higher_advantage_also_among_bad_ones(collector):
    for advantage in (group_zscore, group_center):
        got = collect(collector(gives(-3, -1, -2, -4, 5, 6, 7, 8), advantage=advantage)).batch.advantages
        assert got[:4].argsort().tolist() == [3, 0, 2, 1] and got[4:].argsort().tolist() == [0, 1, 2, 3]


def test_a_reward_that_is_no_reward_stops_the_rollout_by_name(collector):
    with pytest.raises(RewardError, match="'score' returned 7 values for 8 completions"):
        collect(collector(gives(*range(7))))
    with pytest.raises(ValueError, match="row 1 of the rollout has no column 'prompt'"):
        collect(collector(), [ROWS[0], {"question": "?"}])


def test_a_prompt_that_leaves_no_room_for_a_completion_stops_the_rollout_before_it_is_generated(collector):
    built = collector(limit=PromptLimit(context=9, max_completion_length=5))  # room for 4 tokens; the prompts: 2, 5
    with pytest.raises(ValueError, match="row 1 of the rollout: the prompt has 5 tokens"):
        collect(built)
    assert built.generator.calls == []


def test_a_prompt_over_the_limit_reaches_generation_and_the_table_cut(collector, tiny_tokenizer):
    built = collector(limit=PromptLimit(max_prompt_length=3, tokenizer=tiny_tokenizer))
    rollout = collect(built)
    assert [len(p) for p in built.generator.calls[0][0]] == [2, 3]
    assert [p.tolist() for p in rollout.batch.prompt_ids] == [tiny_tokenizer(t)["input_ids"] for t in ("ab", "cde")]
    assert rollout.table["prompt"] == ["ab"] * 4 + ["cde"] * 4
    # 4 * 2 + 4 * 3 prompt tokens, 24 of completions
    assert rollout.num_tokens == 20 + 24


@pytest.mark.parametrize("policy", ["filter", "error"])
def test_a_prompt_over_the_limit_that_may_not_be_cut_stops_the_rollout_before_it_is_generated(collector, policy):
    built = collector(limit=PromptLimit(max_prompt_length=3, overlong=policy))
    with pytest.raises(
        ValueError, match="row 1 of the rollout: the prompt has 5 tokens, more than max_prompt_length=3"
    ):
        collect(built)
    assert built.generator.calls == []


def test_a_row_is_kept_unless_a_filter_leaves_it_out(collector):
    assert collector().keeps(ROWS[1], "row 1")
    filters = collector(limit=PromptLimit(max_prompt_length=3, overlong="filter"))
    assert filters.keeps(ROWS[0], "row 0") and not filters.keeps(ROWS[1], "row 1")
    with pytest.raises(ValueError, match="row 2: the prompt is empty"):
        filters.keeps({"prompt": ""}, "row 2")


def test_a_row_that_another_process_completes_is_compared_as_well(collector):
    built = collector()
    assert built.keeps({"prompt": "ab"}, "row 0")
    with pytest.raises(ValueError, match=r"strings \(row 0\) and lists of messages \(row 1\)"):
        built.keeps({"prompt": [{"role": "user", "content": "ab"}]}, "row 1")


def test_a_prompt_of_another_format_is_named_when_it_is_met_also_in_a_later_rollout(collector):
    chat = [{"prompt": [{"role": "user", "content": text}], "answer": 1} for text in ("ab", "cd")]
    with pytest.raises(ValueError, match=r"strings \(row 0 of the rollout\) and lists of messages \(row 1 of the rol"):
        collect(collector(), [ROWS[0], chat[0]])
    built = collector()
    collect(built)
    built.collect(ROWS, [4, 4], seed=1, names=["row 6 of train_dataset", "row 7 of train_dataset"])
    evaluation = dataclasses.replace(built)  # a set of its own may be of another format
    evaluation.draw(chat, [4, 4], seed=1)
    with pytest.raises(ValueError, match=r"strings \(row 0 of the rollout\) and lists of messages \(row 8 of train_"):
        built.collect(chat, [4, 4], seed=1, names=["row 8 of train_dataset", "row 9 of train_dataset"])


def test_a_generator_that_returns_another_number_is_found_out(collector):
    with pytest.raises(ValueError, match="returned 7 completions, 8 were asked for"):
        collect(collector(texts=TEXTS[:7], finished=FINISHED[:7]))


# --- sampled in earnest -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [helpers.tiny_llama, helpers.tiny_gpt2])
def test_a_tokenizer_that_pads_on_the_right_changes_nothing(collector, tiny_tokenizer, build):
    model = build()
    parts = {"generator": HFGenerator(lambda: model), "policy": lambda: model, "keep_old_logprobs": True}
    rewards = RewardSet([lambda completion_ids, **kwargs: [float(sum(ids)) for ids in completion_ids]])
    left = collect(collector(rewards=rewards, **parts)).batch
    tiny_tokenizer.padding_side = "right"
    right = collect(collector(rewards=rewards, **parts)).batch
    assert torch.equal(left.completion_ids, right.completion_ids)
    assert torch.equal(left.old_logprobs, right.old_logprobs)
    assert torch.equal(left.advantages, right.advantages) and left.advantages.any()
    assert tiny_tokenizer.padding_side == "right"
