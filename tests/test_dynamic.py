"""Dynamic sampling: which groups a rollout is made of, and what is known of them."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset, IterableDataset
from transformers import TrainerCallback

from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.dynamic import DynamicSampling, Group
from tests.helpers import tiny_llama, tiny_tokenizer

COMMON = dict(
    bf16=False,
    use_cpu=True,
    report_to="none",
    save_strategy="no",
    disable_tqdm=True,
    shuffle_dataset=False,
    per_device_train_batch_size=4,
    num_generations=2,
    max_completion_length=4,
    learning_rate=1e-2,
    logging_steps=1,
    dynamic_sampling=True,
)


class Watch(TrainerCallback):
    """Keeps the prompts of each rollout and the figures of each step."""

    def __init__(self):
        self.rollouts, self.logs = [], []

    def on_rollout(self, args, state, control, table):
        self.rollouts.append(list(dict.fromkeys(table["prompt"])))

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(logs)


def train(live, *, count=12, stream=False, **settings):
    """Trains on prompts "A", "B", …; those in ``live`` have a group with a signal."""
    rows = [{"prompt": chr(ord("A") + i)} for i in range(count)]

    def reward(prompts, completions, **kwargs):
        return [float(i % 2) if prompt in live else 1.0 for i, prompt in enumerate(prompts)]

    data = IterableDataset.from_generator(lambda: iter(rows)) if stream else Dataset.from_list(rows)
    watch = Watch()
    trainer = GRPOTrainer(
        tiny_llama(num_hidden_layers=1),
        reward,
        GRPOConfig("out", **{**COMMON, **settings}),
        data,
        processing_class=tiny_tokenizer(),
        callbacks=[watch],
    )
    batches, collect = [], trainer.dynamic_sampling.collect

    def keep(*args, **kwargs):
        rollout = collect(*args, **kwargs)
        batches.append(rollout.batch)
        return rollout

    trainer.dynamic_sampling.collect = keep
    trainer.train()
    return trainer, watch, batches


def figures(watch, name):
    return [log[f"dynamic_sampling/{name}"] for log in watch.logs if "loss" in log]


@pytest.mark.parametrize("stream", [False, True])
def test_by_hand(stream):
    """Rollouts of 2 groups; of the prompts A to L, in order, B C F G H I have a signal.

    step 1   A B, then C D                      B C
    step 2   E F, then G H: one too many        F G     H waits
    step 3   I J, with H                        H I
    """
    _, watch, batches = train("BCFGHI", max_steps=3, stream=stream)
    assert watch.rollouts == [["B", "C"], ["F", "G"], ["H", "I"]]
    assert figures(watch, "rounds") == [2, 2, 1]
    assert figures(watch, "groups_asked") == [4, 4, 2]
    assert figures(watch, "groups_kept") == [2, 3, 1]
    assert figures(watch, "groups_carried") == [0, 0, 1]
    assert figures(watch, "groups_waiting") == [0, 1, 0]
    assert figures(watch, "frac_silent") == [0.5, 0.25, 0.5]
    # all that was drawn counts in the figures about the policy: half the rewards of a live group are 1, all of a silent
    assert [log["reward"] for log in watch.logs if "loss" in log] == [0.75, 0.625, 0.75]
    assert [batch.old_logprobs is None for batch in batches] == [True, True, False]
    assert all((batch.advantages != 0).all() for batch in batches)


def test_a_group_that_waited_keeps_the_log_probs_of_the_policy_that_drew_it(monkeypatch):
    seen = {}
    compute = DynamicSampling._with_old_logprobs

    def keep(self, collector, groups):
        for group in groups:
            if group.old_logprobs is None:
                weights = {k: v.clone() for k, v in collector.policy().state_dict().items()}
                seen[group.prompt.text] = (group, weights)
        return compute(self, collector, groups)

    monkeypatch.setattr(DynamicSampling, "_with_old_logprobs", keep)
    trainer, _, batches = train("BCFGHI", max_steps=3)
    group, weights = seen["H"]
    then = tiny_llama(num_hidden_layers=1)
    then.load_state_dict(weights)
    for row, ids in enumerate(group.completions.ids):
        whole = torch.tensor([[*group.prompt.ids, *ids]])
        with torch.no_grad():
            logprobs = then(input_ids=whole).logits.double().log_softmax(-1)
        start = len(group.prompt.ids)
        expected = [logprobs[0, start + t - 1, token].item() for t, token in enumerate(ids)]
        assert batches[2].old_logprobs[row, : len(ids)].tolist() == pytest.approx(expected, abs=1e-5)
    moved = torch.cat([(weights[k] - v).flatten() for k, v in trainer.model.state_dict().items()])
    assert moved.abs().max() > 1e-3  # else the log-probs of now would do as well


def test_what_waits_too_long_is_dropped_and_counted():
    """Of 4 prompts B C D have a signal: the first two are trained on, D waits, and may or may not be used in step 2."""
    _, watch, _ = train("BCD", count=4, max_steps=4, dynamic_sampling_max_age=1)
    # step 1: A B, C D; step 2: D, A B; step 3: C D; step 4: as step 1
    assert watch.rollouts == [["B", "C"], ["D", "B"], ["C", "D"], ["B", "C"]]
    _, watch, _ = train("BCD", count=4, max_steps=4, dynamic_sampling_max_age=0)
    assert watch.rollouts == [["B", "C"], ["B", "C"], ["B", "C"], ["B", "C"]]
    assert figures(watch, "groups_aged_out") == [0, 1, 1, 1]


@pytest.mark.parametrize(("at_cap", "counted"), [("fill", 8), ("partial", 4)])
def test_at_the_cap_silent_groups_fill_the_rollout_up(at_cap, counted):
    """One group of two has a signal; each has 2 completions of 2 tokens."""
    _, watch, batches = train(
        "A",
        max_steps=1,
        dynamic_sampling_max_rounds=3,
        dynamic_sampling_at_cap=at_cap,
        max_completion_length=2,
        generation_kwargs={"bad_words_ids": [[1]]},  # no end before the limit
    )
    assert watch.rollouts == [["A", "B"]] and figures(watch, "rounds") == [3]
    assert batches[0].mask.sum() == counted
    assert batches[0].advantages[2:].tolist() == [0, 0]


def test_at_the_cap_a_run_can_end():
    with pytest.raises(
        RuntimeError, match=r"3 rounds of 2 prompts.*max_rounds=3\).*found 0 groups.*'fill' or 'partial'"
    ):
        train("", max_steps=1, dynamic_sampling_max_rounds=3, dynamic_sampling_at_cap="error")


def test_a_prompt_that_is_asked_again_gets_other_completions():
    """Without a signal, all three readings of the two prompts are made for one step."""
    drawn = []
    trainer, _, _ = train("", count=2, max_steps=1, dynamic_sampling_max_rounds=1)
    together = trainer.collector.draw_together
    trainer.collector.draw_together = lambda *a, **k: drawn.append(together(*a, **k)) or drawn[-1]
    trainer.dynamic_sampling.max_rounds = 3
    trainer.train()
    assert len({own.completions.ids for own, _ in drawn}) == 3


def test_a_state_survives_a_checkpoint(tmp_path):
    trainer, _, _ = train("BCFGHI", max_steps=2)
    state = trainer.dynamic_sampling.state_dict()
    torch.save(state, tmp_path / "state.pt")
    again = DynamicSampling(max_rounds=1, at_cap="fill", max_age=1)
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert again.rounds == 4
    (before,), (after,) = trainer.dynamic_sampling.waiting, again.waiting
    assert isinstance(after, Group) and after.prompt == before.prompt and after.completions == before.completions
    assert torch.equal(after.rewards, before.rewards) and torch.equal(after.old_logprobs, before.old_logprobs)
