"""What is remembered of prompts, and which are drawn next."""

from __future__ import annotations

import pandas as pd
import pytest
import torch
from datasets import Dataset, IterableDataset

from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.difficulty import PROMPT_SAMPLING, PromptMemory
from grpo_trainer.sampler import BatchPlan, RolloutSampler
from tests.helpers import tiny_llama, tiny_tokenizer

nan = float("nan")


def memory(how, count=6, *, prompts=2, skip_epochs=1, shuffle=False) -> PromptMemory:
    plan = BatchPlan(
        per_device_train_batch_size=2 * prompts,
        world_size=1,
        steps_per_generation=1,
        gradient_accumulation_steps=1,
        num_iterations=1,
        num_generations=2,
    )
    sampler = RolloutSampler(count, plan, shuffle=shuffle, seed=3)
    return PromptMemory(sampler, how, pass_reward=1.0, skip_epochs=skip_epochs)


def test_a_pass_rate_is_the_share_of_the_scorable_completions_of_the_last_group_that_passed():
    it = memory("uniform", 4)
    it.count([2, 0], torch.tensor([[1.0, 0.5, 3.0, nan], [0.0, 0.2, 0.9, 0.99]]), step=5)
    assert it.pass_rate.tolist() == pytest.approx([0.0, nan, 2 / 3, nan], nan_ok=True)
    it.count([2, 3], torch.tensor([[0.0, 0.0, 0.0, 1.0], [nan] * 4]), step=6)
    assert it.pass_rate.tolist() == pytest.approx([0.0, nan, 1 / 4, nan], nan_ok=True)
    assert it.table() == {
        "row": [0, 2, 3],
        "pass_rate": [0.0, 0.25, None],
        "visits": [1, 2, 1],
        "last_step": [5, 6, 6],
    }
    assert it.figures() == {  # of 4 prompts two have a rate: 0 and 1/4
        "prompts/frac_seen": 0.5,
        "prompts/frac_solved": 0.0,
        "prompts/frac_hopeless": 0.5,
        "prompts/pass_rate": 0.125,
    }


def test_uniform_is_the_order_without_a_memory():
    it = memory("uniform", 7, shuffle=True)
    drawn = [it.rollout(0).prompts for _ in range(7)]
    expected = []
    for epoch in range(3):  # of 7 prompts in twos one is left over
        order = RolloutSampler(7, it._sampler.plan, shuffle=True, seed=3).order(epoch)
        expected += [order[0:2], order[2:4], order[4:6]]
    assert drawn == expected[:7]


def test_solved_and_hopeless_prompts_are_left_out_for_an_epoch():
    """Of 0 to 5, 1 is solved, 4 hopeless, 5 cannot be scored; in epoch 1 they stay out, in epoch 2 they are back."""
    it = memory("skip_solved_and_hopeless")
    rewards = {1: [1.0, 2.0], 4: [0.0, 0.0], 5: [nan, nan]}
    drawn = []
    for step in range(8):
        prompts = it.rollout(0).prompts
        drawn.append(prompts)
        it.count(prompts, torch.tensor([rewards.get(p, [0.0, 1.0]) for p in prompts]), step)
    assert drawn == [[0, 1], [2, 3], [4, 5], [0, 2], [3, 5], [0, 1], [2, 3], [4, 5]]


def test_where_too_few_are_left_the_epochs_pass_until_the_others_are_back():
    it = memory("skip_solved_and_hopeless", 4, skip_epochs=3)
    for expected in ([0, 1], [2, 3], [0, 1], [2, 3]):
        assert it.rollout(0).prompts == expected
        it.count(expected, torch.zeros(2, 2), 0)
    assert it._epoch == 4


def test_the_weights_are_those_of_a_coin():
    """p = (passed + 1/2) / (scored + 1); weight p(1 - p)."""
    it = memory("variance", 4)
    it.count([0, 1, 2], torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]]), 0)
    p = [4.5 / 5, 2.5 / 5, 1.5 / 5, 0.5]
    assert it.weights().tolist() == pytest.approx([x * (1 - x) for x in p])


def test_prompts_are_drawn_with_those_weights_and_none_twice():
    it = memory("variance", 4)
    it.count([0, 1, 2], torch.tensor([[1.0] * 8, [0.0, 1.0] * 4, [0.0] * 8]), 0)
    rollouts = [it.rollout(0).prompts for _ in range(4000)]
    assert all(len(set(prompts)) == 2 for prompts in rollouts)
    first = torch.bincount(torch.tensor([prompts[0] for prompts in rollouts]), minlength=4) / 4000
    weights = it.weights() / it.weights().sum()
    assert first.tolist() == pytest.approx(weights.tolist(), abs=5 * (0.25 / 4000) ** 0.5)


def test_a_state_is_taken_up_where_it_was(tmp_path):
    for how in PROMPT_SAMPLING:
        it, again = memory(how, 8, shuffle=True), memory(how, 8, shuffle=True)
        for step in range(5):
            prompts = it.rollout(0).prompts
            it.count(prompts, torch.tensor([[0.0, float(p % 2)] for p in prompts]), step)
        torch.save(it.state_dict(), tmp_path / "state.pt")
        again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert [it.rollout(0).prompts for _ in range(6)] == [again.rollout(0).prompts for _ in range(6)]
        assert it.table() == again.table()


SETTINGS = dict(
    bf16=False,
    use_cpu=True,
    report_to="none",
    disable_tqdm=True,
    shuffle_dataset=False,
    per_device_train_batch_size=4,
    num_generations=2,
    max_completion_length=3,
    max_steps=4,
    logging_steps=1,
)


def test_in_a_run_solved_prompts_are_left_out_and_the_table_is_written(tmp_path):
    rows = [{"prompt": letter} for letter in "ABCD"]
    seen = []

    def reward(prompts, completions, **kwargs):
        seen.append(list(dict.fromkeys(prompts)))
        return [1.0 if p == "B" else float(i % 2) for i, p in enumerate(prompts)]

    config = GRPOConfig(str(tmp_path), **SETTINGS, prompt_sampling="skip_solved_and_hopeless", save_steps=4)
    trainer = GRPOTrainer(
        tiny_llama(num_hidden_layers=1), reward, config, Dataset.from_list(rows), processing_class=tiny_tokenizer()
    )
    trainer.train()
    # epoch 0: A B, C D; epoch 1, without B: A C, and D alone is no rollout; epoch 2: A B
    assert seen == [["A", "B"], ["C", "D"], ["A", "C"], ["A", "B"]]
    table = pd.read_parquet(tmp_path / "prompts.parquet")
    assert table.to_dict("list") == {
        "row": [0, 1, 2, 3],
        "pass_rate": [0.5, 1.0, 0.5, 0.5],
        "visits": [3, 2, 2, 1],
        "last_step": [3, 3, 2, 1],
    }
    assert trainer.state.log_history[-2]["prompts/frac_solved"] == 0.25


def test_a_stream_has_no_memory():
    stream = IterableDataset.from_generator(lambda: iter([{"prompt": "A"}]))
    config = GRPOConfig("out", **SETTINGS, prompt_sampling="variance")
    with pytest.raises(ValueError, match=r"prompt_sampling='variance'.*a stream.*with a length"):
        GRPOTrainer(tiny_llama(), lambda **k: [], config, stream, processing_class=tiny_tokenizer())
