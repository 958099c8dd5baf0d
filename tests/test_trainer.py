"""The trainer as a user meets it: what it trains on, what it logs, what it leaves alone, what it refuses."""

from __future__ import annotations

import copy
import json
import logging
import os
import random
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import trl
from datasets import Dataset, DatasetDict
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.types import Completions
from tests.helpers import EOS_ID, tiny_llama, tiny_tokenizer

PROMPTS = [{"prompt": text, "answer": i} for i, text in enumerate(["one", "two", "three", "four", "five", "six"])]


def length_reward(completions, **kwargs):
    return [float(len(c)) for c in completions]


def by_place(completions, **kwargs):
    """Every completion of a group of four carries a gradient."""
    return [float(i) for i in range(len(completions))]


def make(tmp_path, reward=length_reward, rows=PROMPTS, model=None, tokenizer=None, generator=None, **settings):
    callbacks = settings.pop("callbacks", None)
    peft_config = settings.pop("peft_config", None)
    eval_dataset = settings.pop("eval_dataset", None)
    config = GRPOConfig(
        str(tmp_path),
        **{
            "per_device_train_batch_size": 8,
            "num_generations": 4,
            "max_completion_length": 6,
            "max_steps": 2,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "bf16": False,
            "use_cpu": True,
            "report_to": "none",
            "save_strategy": "no",
            "disable_tqdm": True,
            **settings,
        },
    )
    trainer = GRPOTrainer(
        tiny_llama() if model is None else model,
        reward,
        config,
        Dataset.from_list(rows) if isinstance(rows, list) else rows,
        processing_class=tokenizer or tiny_tokenizer(),
        callbacks=callbacks,
        peft_config=peft_config,
        eval_dataset=eval_dataset,
    )
    if generator is not None:
        trainer.collector.generator = generator
    return trainer


def logs(trainer, key):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


class Scripted:
    """Completions of given ids, in turn; finished unless told otherwise."""

    def __init__(self, *ids, finished=True):
        self.ids, self.finished, self.calls = ids, finished, 0

    def generate(self, prompts, num_samples, sampling, *, seed, row_ids=None, observer=None):
        self.calls += 1
        n = sum(num_samples)
        ids = tuple(tuple(self.ids[i % len(self.ids)]) for i in range(n))
        return Completions(ids=ids, finished=(self.finished,) * n)


# --- the reference ---------------------------------------------------------------------------------------------------


def used_adapter():
    """An adapter with weights that change the output, as after an earlier training."""
    model = get_peft_model(tiny_llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("kind", ["full", "new adapter", "used adapter"])
def test_kl_is_zero_before_the_first_update_and_not_afterwards(tmp_path, kind, bf16):
    settings = {"beta": 0.1, "bf16": bf16, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
    if kind == "new adapter":
        settings["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = make(tmp_path, model=used_adapter() if kind == "used adapter" else None, max_steps=4, **settings)
    trainer.train()
    kl = logs(trainer, "kl")
    assert abs(kl[0]) < 1e-6
    assert max(kl[1:]) > 1e-6


@pytest.mark.parametrize("kind", ["full", "used adapter"])
def test_the_reference_does_not_move_when_the_policy_trains(tmp_path, kind):
    trainer = make(tmp_path, beta=0.1, model=used_adapter() if kind == "used adapter" else None, learning_rate=0.1)
    ids = torch.tensor([[5, 6, 7, 8]])

    def reference_logits():
        with trainer.collector.reference.activate() as model, torch.no_grad():
            return model(ids).logits.clone()

    before, policy_before = reference_logits(), trainer.model(ids).logits.detach().clone()
    trainer.train()
    assert torch.equal(reference_logits(), before)
    assert not torch.allclose(trainer.model(ids).logits, policy_before, atol=1e-3)


def test_without_beta_there_is_no_reference_and_no_kl(tmp_path):
    trainer = make(tmp_path)
    trainer.train()
    assert trainer.collector.reference is None
    assert not logs(trainer, "kl")


def test_loss_without_advantage_is_beta_times_kl_and_the_reward_does_not_know_of_it(tmp_path):
    rewards = {}
    for beta in (0.1, 0.4):
        trainer = make(tmp_path, reward=lambda completions, **_: [1.0] * len(completions), beta=beta, seed=3)
        reference = tiny_llama(seed=9)  # another model, so that the KL is not 0
        trainer.collector.reference._model = reference
        trainer.train()
        rewards[beta] = logs(trainer, "reward")[0]
        assert logs(trainer, "loss")[0] == pytest.approx(beta * logs(trainer, "kl")[0], rel=1e-4)
        assert logs(trainer, "kl")[0] > 0.01
    assert rewards[0.1] == rewards[0.4] == 1.0


# --- passes ----------------------------------------------------------------------------------------------------------


def count_training_passes(trainer):
    """How often the policy or the reference scores completions: forward passes that keep no cache."""
    passes = []

    def note(model, args, kwargs):
        if not kwargs.get("use_cache", True):
            passes.append("grad" if torch.is_grad_enabled() else "no grad")

    trainer.model.register_forward_pre_hook(note, with_kwargs=True)
    return passes


def test_a_rollout_that_is_used_at_once_costs_no_further_pass(tmp_path):
    trainer = make(
        tmp_path,
        by_place,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        gradient_checkpointing=False,
        max_tokens_per_microbatch=None,
    )
    passes = count_training_passes(trainer)
    trainer.train()
    assert passes == ["grad"] * 2 * 2


@pytest.mark.parametrize("settings", [{"num_iterations": 2}, {"steps_per_generation": 2}])
def test_a_rollout_that_outlives_its_step_has_its_log_probs_taken_before_the_first_update(tmp_path, settings):
    def varied(completion_ids, **_):
        return [float(sum(ids) % 7) for ids in completion_ids]

    trainer = make(tmp_path, varied, gradient_checkpointing=False, learning_rate=0.1, **settings)
    passes = count_training_passes(trainer)
    seen = []
    inner = trainer.objective.policy_loss

    def spy(logprobs, old, advantages, mask, **kwargs):
        seen.append((logprobs.detach() - old)[mask].abs().max().item())
        return inner(logprobs, old, advantages, mask, **kwargs)

    trainer.objective = dataclasses_replace(trainer.objective, policy_loss=spy)
    trainer.train()
    assert passes.count("no grad") == settings.get("steps_per_generation", 1)
    assert seen[0] == 0.0  # the same weights in the same rectangle
    assert seen[1] > 1e-3  # the first update has moved them


def dataclasses_replace(obj, **changes):
    import dataclasses

    return dataclasses.replace(obj, **changes)


def test_gradients_are_the_same_with_and_without_checkpointing_also_with_an_adapter(tmp_path):
    def varied(completion_ids, **_):
        return [float(sum(ids) % 7) for ids in completion_ids]

    for adapter in (None, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")):
        norms = []
        for checkpointing in (True, False):
            trainer = make(
                tmp_path, varied, gradient_checkpointing=checkpointing, peft_config=adapter, max_grad_norm=0.0
            )
            if adapter is not None:
                for name, parameter in trainer.model.named_parameters():
                    if "lora_B" in name:
                        parameter.data.fill_(0.01)
            trainer.train()
            norms.append(logs(trainer, "grad_norm"))
        assert norms[0] == pytest.approx(norms[1], rel=1e-6)
        assert min(norms[0]) > 0


def test_only_the_adapter_is_trained(tmp_path):
    trainer = make(tmp_path, peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    trainer.train()
    changed = {n for n, p in trainer.model.named_parameters() if not torch.equal(p, before[n])}
    assert changed
    assert all("lora_" in name for name in changed)


# --- what is logged --------------------------------------------------------------------------------------------------


def test_the_loss_is_zero_on_policy_and_its_gradient_is_not(tmp_path):
    """Completions of equal length: the mean of ratio * A is the mean of A, which is 0 in every group."""
    trainer = make(
        tmp_path,
        reward=lambda completion_ids, **_: [float(ids[0]) for ids in completion_ids],
        generator=Scripted((5, 6), (7, 8), (9, 10), (11, 12)),
    )
    trainer.train()
    assert abs(logs(trainer, "loss")[0]) < 1e-6
    assert logs(trainer, "grad_norm")[0] > 1e-3


def test_groups_without_spread_have_no_gradient(tmp_path, caplog):
    trainer = make(tmp_path, reward=lambda completions, **_: [0.1] * len(completions))
    with caplog.at_level(logging.WARNING, logger="grpo_trainer"):
        trainer.train()
    assert logs(trainer, "grad_norm") == [0.0, 0.0]
    assert logs(trainer, "frac_reward_zero_std") == [1.0, 1.0]
    assert sum("nothing to learn from" in r.message for r in caplog.records) == 1  # said once


def test_the_logged_reward_is_the_weighted_sum_that_is_optimised(tmp_path):
    def good(completions, **_):
        return [1.0] * len(completions)

    def bad(completions, **_):
        return [0.0] * len(completions)

    trainer = make(tmp_path, reward=[good, bad], reward_weights=[0.7, 0.3])
    trainer.train()
    assert logs(trainer, "reward")[0] == pytest.approx(0.7)
    assert logs(trainer, "rewards/good/mean")[0] == 1.0
    assert logs(trainer, "rewards/bad/mean")[0] == 0.0


def test_completions_that_no_reward_applies_to_do_not_poison_the_figures(tmp_path):
    """Rewards 1, None, 3, 2 in each group: mean 2 over three, sample deviation 1; advantages -1, 0, 1, 0."""
    seen = []
    trainer = make(tmp_path, reward=lambda completions, **_: [1.0, None, 3.0, 2.0] * (len(completions) // 4))
    inner = trainer.collector.collect

    def spy(*args, **kwargs):
        rollout = inner(*args, **kwargs)
        seen.append(rollout.batch.advantages.tolist())
        return rollout

    trainer.collector.collect = spy
    trainer.train()
    assert seen[0] == pytest.approx([-0.99990, 0, 0.99990, 0] * 2, abs=1e-5)
    assert logs(trainer, "reward")[0] == 2.0
    assert logs(trainer, "reward_std")[0] == pytest.approx((4 / 5) ** 0.5)  # 1, 3, 2 twice: squares 2 + 2 over 6 - 1


def test_a_batch_that_no_reward_applies_to_leaves_every_figure_finite(tmp_path, caplog):
    trainer = make(tmp_path, reward=lambda completions, **_: [None] * len(completions))
    before = copy.deepcopy(trainer.model.state_dict())
    with caplog.at_level(logging.WARNING, logger="grpo_trainer"):
        trainer.train()
    values = [v for entry in trainer.state.log_history for v in entry.values()]
    assert all(v == v and abs(v) != float("inf") for v in values)
    assert not logs(trainer, "reward")
    assert all(torch.equal(p, before[n]) for n, p in trainer.model.state_dict().items())
    assert any("no reward function applied" in r.message for r in caplog.records)


@pytest.mark.parametrize("masked", [False, True])
def test_lengths_are_those_of_generation_whatever_is_masked(tmp_path, masked):
    class Generator(Scripted):
        def generate(self, *args, **kwargs):
            made = super().generate(*args, **kwargs)
            return Completions(ids=made.ids, finished=tuple(len(ids) == 3 for ids in made.ids))

    generator = Generator((5, 6, 7, 8, 9), (5, 6, EOS_ID))  # one cut after 5, one ended after 3
    trainer = make(tmp_path, generator=generator, mask_truncated_completions=masked)
    trainer.train()
    assert logs(trainer, "completions/mean_length")[0] == 4.0
    assert logs(trainer, "completions/clipped_ratio")[0] == 0.5
    assert logs(trainer, "completions/mean_terminated_length")[0] == 3.0


def test_nothing_but_cut_completions_leaves_the_ended_lengths_out_and_is_said_once(tmp_path, caplog):
    trainer = make(tmp_path, generator=Scripted((5, 6, 7, 8, 9, 10), finished=False), mask_truncated_completions=True)
    with caplog.at_level(logging.WARNING, logger="grpo_trainer"):
        trainer.train()
    assert logs(trainer, "completions/clipped_ratio") == [1.0, 1.0]
    assert not logs(trainer, "completions/mean_terminated_length")
    assert logs(trainer, "grad_norm") == [0.0, 0.0]
    assert sum("max_completion_length=6" in r.message for r in caplog.records) == 1


def test_tokens_of_a_rollout_are_counted_once_however_often_it_is_used(tmp_path):
    counted = []
    for iterations in (1, 3):
        trainer = make(tmp_path, generator=Scripted((5, 6)), num_iterations=iterations, max_steps=iterations)
        trainer.train()
        counted.append(logs(trainer, "num_tokens")[-1])
    # 8 completions of 2 tokens; prompts are drawn from words of 3 to 5 characters, one token each, 4 times each
    assert counted[0] == counted[1]
    assert 8 * (2 + 3) <= counted[0] <= 8 * (2 + 5)


def test_empty_completions_are_legal(tmp_path):
    trainer = make(tmp_path, generator=Scripted((), (5,)))
    trainer.train()
    assert logs(trainer, "completions/min_length")[0] == 0
    all_empty = make(tmp_path, generator=Scripted(()))
    all_empty.train()
    assert logs(all_empty, "grad_norm") == [0.0, 0.0]


def test_times_add_up_to_the_step(tmp_path):
    trainer = make(tmp_path, beta=0.1)
    trainer.train()
    for entry in trainer.state.log_history[:-1]:
        parts = sum(entry[f"time/{name}"] for name in ("generation", "rewards", "logprobs", "update"))
        assert parts == pytest.approx(entry["step_time"])
        assert entry["time/generation"] > 0
        assert entry["tokens_per_second"] > 0


# --- data and steps --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("iterations", "steps"), [(1, 8), (2, 16)])
def test_number_of_steps(tmp_path, iterations, steps):
    """16 prompts x 4 completions / (4 rows x 2 micro-batches) = 8 optimizer steps, times the passes."""
    trainer = make(
        tmp_path,
        rows=[{"prompt": "abcdefgh"[i % 8] * (1 + i // 8)} for i in range(16)],
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_iterations=iterations,
        num_train_epochs=1,
        max_steps=-1,
        generator=Scripted((5, 6), (7,)),
    )
    trainer.train()
    assert trainer.state.global_step == steps


def test_a_dataset_of_prompts_alone_is_enough(tmp_path):
    make(tmp_path, rows=[{"prompt": "a"}, {"prompt": "b"}]).train()


def test_rewards_get_texts_for_texts_messages_for_messages_and_every_column(tmp_path):
    seen = {}

    def reward(prompts, completions, completion_ids, answer, trainer_state, log_extra, log_metric, **kwargs):
        seen.update(prompts=prompts, completions=completions, answer=answer, ids=completion_ids, others=kwargs)
        seen["step"] = trainer_state.global_step
        log_metric("mine", 2.0)
        log_extra("note", ["x"] * len(prompts))
        return [0.0] * len(prompts)

    trainer = make(tmp_path, reward=reward, max_steps=1)
    trainer.train()
    assert [p for p in seen["prompts"][:4]] == [seen["prompts"][0]] * 4
    assert PROMPTS[seen["answer"][0]]["prompt"] == seen["prompts"][0]
    assert all(isinstance(c, str) for c in seen["completions"])
    assert len(seen["ids"]) == 8
    assert seen["step"] == 0
    assert not seen["others"]
    assert logs(trainer, "mine") == [2.0]
    chat = [{"prompt": [{"role": "user", "content": text["prompt"]}], "answer": 0} for text in PROMPTS]
    make(tmp_path, reward=reward, rows=chat, max_steps=1).train()
    assert all(c[0].keys() == {"role", "content"} and c[0]["role"] == "assistant" for c in seen["completions"])


def test_the_users_objects_are_left_alone(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = "right"
    tokenizer.pad_token = None
    functions = [length_reward]
    trainer = make(tmp_path, reward=functions, tokenizer=tokenizer)
    trainer.train()
    assert tokenizer.padding_side == "right"
    assert tokenizer.pad_token is None
    assert functions == [length_reward]
    assert trainer.processing_class.padding_side == "left"


def test_rewards_of_the_same_name_do_not_hide_each_other(tmp_path):
    trainer = make(
        tmp_path,
        reward=[lambda completions, **_: [1.0] * len(completions), lambda completions, **_: [2.0] * len(completions)],
    )
    trainer.train()
    assert logs(trainer, "rewards/lambda/mean")[0] == 1.0
    assert logs(trainer, "rewards/lambda_2/mean")[0] == 2.0


def test_the_completions_table_holds_every_completion_of_every_step(tmp_path, capsys):
    trainer = make(tmp_path, log_completions=True, num_completions_to_print=1, max_steps=3)
    trainer.train()
    files = sorted((tmp_path / "completions").glob("*.parquet"))
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    assert [row["step"] for row in rows] == [1] * 8 + [2] * 8 + [3] * 8
    assert {"prompt", "completion", "length_reward", "advantage", "finished", "length"} <= rows[0].keys()
    assert all(row["length_reward"] == len(row["completion"]) for row in rows)
    assert "Step 3" in capsys.readouterr().out


# --- evaluation, saving, going on ------------------------------------------------------------------------------------


def test_evaluation_is_repeatable_and_leaves_the_training_as_it_is_without_it(tmp_path):
    held_out = Dataset.from_list([{"prompt": "seven"}, {"prompt": "eight"}, {"prompt": "nine"}])
    plain = make(tmp_path, max_steps=4)
    plain.train()
    watched = make(tmp_path, max_steps=4, eval_dataset=held_out, eval_strategy="steps", eval_steps=1)
    first, second = watched.evaluate(), watched.evaluate()
    assert first["eval_reward"] == second["eval_reward"]
    assert first["eval_completions/mean_length"] <= 6
    watched.train()
    assert len(logs(watched, "eval_reward")) == 4
    assert logs(watched, "reward") == logs(plain, "reward")
    for a, b in zip(plain.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_reward_that_rolls_dice_is_repeatable_in_evaluation_and_undisturbed_in_training(tmp_path):
    def dice(completions, **kwargs):
        return [random.random() + np.random.rand() + torch.rand(()).item() for _ in completions]

    held_out = Dataset.from_list([{"prompt": "seven"}, {"prompt": "eight"}])
    plain = make(tmp_path, reward=dice)
    plain.train()
    watched = make(tmp_path, reward=dice, eval_dataset=held_out, eval_strategy="steps", eval_steps=1)
    assert watched.evaluate()["eval_reward"] == watched.evaluate()["eval_reward"]
    watched.train()
    assert logs(watched, "reward") == logs(plain, "reward")


def test_evaluation_sets_by_name_streams_among_them_and_the_best_checkpoint_of_one(tmp_path):
    sets = DatasetDict(
        short=Dataset.from_list([{"prompt": "a"}]), long=Dataset.from_list([{"prompt": "b" * 9}, {"prompt": "c" * 9}])
    )
    sets["stream"] = sets["long"].to_iterable_dataset()
    trainer = make(
        tmp_path,
        eval_dataset=dict(sets),
        num_generations_eval=1,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        max_steps=3,
        load_best_model_at_end=True,
        metric_for_best_model="eval_long_reward",
    )
    trainer.train()
    rewards = logs(trainer, "eval_long_reward")
    assert len(rewards) == 3 and logs(trainer, "eval_stream_reward") == rewards
    assert len(logs(trainer, "eval_short_reward")) == 3
    best = max(range(3), key=lambda step: rewards[step]) + 1
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")
    saved = AutoModelForCausalLM.from_pretrained(trainer.state.best_model_checkpoint)
    for a, b in zip(saved.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(a, b)
    state = json.loads((tmp_path / "checkpoint-3" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(tmp_path / f"checkpoint-{best}")  # and not where it was written first


def test_a_stream_trains_as_the_dataset_it_comes_from(tmp_path):
    dataset = make(tmp_path, shuffle_dataset=False, max_steps=3)
    dataset.train()
    stream = make(tmp_path, rows=Dataset.from_list(PROMPTS).to_iterable_dataset(), shuffle_dataset=False, max_steps=3)
    stream.train()
    assert logs(stream, "reward") == logs(dataset, "reward")
    for a, b in zip(stream.model.parameters(), dataset.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_stream_needs_a_number_of_steps(tmp_path):
    with pytest.raises(ValueError, match=r"stream without a length.*num_train_epochs=3.0: set max_steps"):
        make(tmp_path, rows=Dataset.from_list(PROMPTS).to_iterable_dataset(), max_steps=-1)


def test_a_bad_row_of_a_stream_is_named_when_it_is_met(tmp_path):
    rows = [{"prompt": "fine"}] * 3 + [{"prompt": ""}]
    trainer = make(tmp_path, rows=Dataset.from_list(rows).to_iterable_dataset(), shuffle_dataset=False)
    with pytest.raises(ValueError, match="row 3 of train_dataset: the prompt is empty"):
        trainer.train()


def test_only_the_newest_checkpoints_and_the_best_are_kept(tmp_path):
    trainer = make(tmp_path, max_steps=5, save_strategy="steps", save_steps=1, save_total_limit=2)
    trainer.train()
    assert sorted(p.name for p in tmp_path.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-5"]


def test_a_checkpoint_of_weights_alone_starts_a_new_run_and_goes_on_with_none(tmp_path):
    trainer = make(tmp_path, max_steps=2, save_strategy="steps", save_steps=2, save_only_model=True)
    trainer.train()
    saved = tmp_path / "checkpoint-2"
    with pytest.raises(ValueError, match=r"no optimizer state \(save_only_model=True\)"):
        make(tmp_path).train(resume_from_checkpoint=True)
    anew = make(tmp_path / "anew", model=str(saved), max_steps=3)
    anew.train()
    assert anew.state.global_step == 3


def test_an_upload_finds_a_checkpoint_in_its_place(tmp_path, monkeypatch):
    """The hub is a stand-in: what it is told to upload must be there, and stay there."""
    uploads = []

    class Hub:
        def create_repo(self, *args, **kwargs):
            return SimpleNamespace(repo_id="me/out")

        def upload_folder(self, folder_path, **kwargs):
            uploads.append((folder_path, sorted(os.listdir(folder_path)), kwargs.get("path_in_repo")))
            return SimpleNamespace(done=lambda: True, exception=lambda: None, result=lambda: None)

    def stand_in_repo(self, token=None):
        self.hub_model_id, self.push_in_progress = "me/out", None

    monkeypatch.setattr("transformers.trainer.hf_api", Hub, raising=False)
    monkeypatch.setattr(GRPOTrainer, "init_hf_repo", stand_in_repo)
    trainer = make(
        tmp_path, save_strategy="steps", save_steps=1, push_to_hub=True, hub_strategy="checkpoint", hub_always_push=True
    )
    trainer.train()
    pushed = [(folder, names) for folder, names, place in uploads if place == "last-checkpoint"]
    assert [folder for folder, _ in pushed] == [str(tmp_path / f"checkpoint-{step}") for step in (1, 2)]
    assert all({"model.safetensors", "run_state_0.pt", "trainer_state.json"} <= set(names) for _, names in pushed)


def test_sample_gives_whole_groups_in_the_order_of_the_rows(tmp_path):
    trainer = make(tmp_path)
    rows = [{"prompt": "abc"}, {"prompt": "xyz"}, {"prompt": "mno"}]
    result = trainer.sample(rows, 5, seed=1)
    assert result.rows == rows
    assert [len(group) for group in result.completions] == [5, 5, 5]
    assert result.rewards.shape == (3, 5)
    assert result.rewards[1, 3] == len(result.completions[1][3])
    assert torch.equal(result.by_function["length_reward"], result.rewards)
    assert trainer.sample(rows, 5, seed=1).completions == result.completions
    assert trainer.sample(rows, 5, seed=2).completions != result.completions


def test_a_saved_model_loads_by_itself(tmp_path):
    trainer = make(tmp_path)
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.chat_template == trainer.processing_class.chat_template
    for a, b in zip(model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("at", [2, 4])
def test_a_resumed_run_is_the_run_that_was_never_stopped(tmp_path, at):
    """6 prompts, 2 a step: step 4 and its checkpoint lie in the second epoch."""
    prompts = {"whole": [], "first": [], "second": []}

    def run(name, steps, resume=None):
        def reward(prompts, completions, **kwargs):
            record.append((prompts, completions))
            return [float(len(c)) for c in completions]

        record = prompts_of[name] = []
        trainer = make(
            tmp_path / ("whole" if name == "whole" else "parts"),
            reward=reward,
            max_steps=steps,
            save_strategy="steps",
            save_steps=at,
            lr_scheduler_type="constant",
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    prompts_of = prompts
    whole = run("whole", 6)
    run("first", at)
    resumed = run("second", 6, resume=str(tmp_path / "parts" / f"checkpoint-{at}"))
    assert prompts["first"] + prompts["second"] == prompts["whole"]
    assert resumed.state.global_step == 6
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_resume_inside_a_rollout_goes_on_with_what_is_left_of_it(tmp_path):
    settings = dict(num_iterations=3, max_steps=6, save_strategy="steps", save_steps=2, gradient_checkpointing=False)
    make(tmp_path, **{**settings, "max_steps": 2}).train()
    generator = Scripted((5, 6), (7,))
    trainer = make(tmp_path, generator=generator, **settings)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert trainer.state.global_step == 6
    assert generator.calls == 1  # for steps 4 to 6; step 3 is the last pass over the first rollout


# --- refusals --------------------------------------------------------------------------------------------------------


def test_generation_that_fails_leaves_the_policy_as_it_was(tmp_path):
    trainer = make(tmp_path)
    trainer.model.train()
    trainer.model.config.use_cache = False
    own = trainer.model.generation_config

    def broken(*args, **kwargs):
        raise RuntimeError("no")

    trainer.model.generate = broken
    with pytest.raises(RuntimeError, match="no"):
        trainer.sample(PROMPTS, 2)
    assert trainer.model.training
    assert trainer.model.config.use_cache is False
    assert trainer.model.generation_config is own


def test_a_reward_that_raises_stops_the_run_with_its_own_error(tmp_path):
    def broken(completions, **_):
        raise KeyError("answer")

    with pytest.raises(KeyError, match="answer"):
        make(tmp_path, reward=broken).train()


REFUSED = {
    "no reward": (dict(reward=None), "reward_funcs is missing"),
    "a reward that is no function": (dict(reward=[3]), "not callable"),
    "a weight too many": (dict(reward_weights=[1.0, 2.0]), "reward_weights has 2 entries for 1"),
    "no prompt column": (dict(rows=[{"question": "a"}]), "row 0 of train_dataset has no column 'prompt'.*question"),
    "an empty prompt": (dict(rows=[{"prompt": "a"}, {"prompt": ""}]), "row 1 of train_dataset.*empty"),
    "a number for a prompt": (dict(rows=[{"prompt": 3}]), "row 0 .*must be a string"),
    "no rows": (dict(rows=[]), "train_dataset is empty"),
    "too few rows": (dict(rows=[{"prompt": "a"}]), "train_dataset has 1 rows.*needs 2 prompts"),
    "no room in the context": (dict(max_completion_length=256), "max_completion_length=256 leaves no room.*256"),
    "a prompt too long for the rest": (
        dict(max_completion_length=250, rows=[{"prompt": "a"}, {"prompt": "b" * 10}]),
        "row 1 .*10 tokens.*max_completion_length=250.*context of 256.*at most 246",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_mistakes_are_refused_with_what_to_do(tmp_path, case):
    settings, message = REFUSED[case]
    with pytest.raises(ValueError, match=f"(?s){message}"):
        make(tmp_path, **settings).train()


def test_another_librarys_configuration_is_refused(tmp_path):
    args = trl.GRPOConfig(str(tmp_path), bf16=False, use_cpu=True, report_to="none")
    with pytest.raises(ValueError, match="import GRPOConfig from grpo_trainer"):
        GRPOTrainer(tiny_llama(), length_reward, args, Dataset.from_list(PROMPTS), processing_class=tiny_tokenizer())


@pytest.mark.parametrize("name", ["tools", "rollout_func", "environment_factory"])
def test_arguments_of_trl_that_are_not_honoured_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match=f"{name} is not supported yet"):
        GRPOTrainer(tiny_llama(), length_reward, processing_class=tiny_tokenizer(), **{name: [len]})


def test_a_template_is_needed_for_messages(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    rows = [{"prompt": [{"role": "user", "content": "a"}]}]
    with pytest.raises(ValueError, match="no chat template"):
        make(tmp_path, rows=rows, tokenizer=tokenizer)


def test_strings_and_messages_in_one_dataset_are_refused(tmp_path):
    rows = [{"prompt": "a"}, {"prompt": [{"role": "user", "content": "b"}]}]
    with pytest.raises(ValueError, match=r"strings \(row 0 of .*messages \(row 1 of train_dataset\)"):
        GRPOTrainer(
            tiny_llama(),
            length_reward,
            GRPOConfig(str(tmp_path), report_to="none", max_completion_length=8),
            rows,
            processing_class=tiny_tokenizer(),
        )


def test_an_evaluation_set_is_checked_when_the_trainer_is_made(tmp_path):
    with pytest.raises(ValueError, match=r"row 0 of eval_dataset\['hard'\] has no column 'prompt'"):
        make(
            tmp_path, eval_dataset={"easy": Dataset.from_list([{"prompt": "a"}]), "hard": Dataset.from_list([{"q": 1}])}
        )


def test_training_again_does_not_use_what_an_earlier_training_left(tmp_path):
    """Stopped in the middle of a rollout of 4 passes; the next training begins with a rollout of its own."""
    trainer = make(tmp_path, num_iterations=4, max_steps=2)
    trainer.train()
    generator = Scripted((5, 6), (7,))
    trainer.collector.generator = generator
    trainer.train()
    assert generator.calls == 1


def test_a_figure_of_the_trainers_own_name_is_refused(tmp_path):
    def reward(completions, log_metric, **_):
        log_metric("reward", 400.0)
        return [0.0] * len(completions)

    with pytest.raises(ValueError, match=r"log_metric\('reward', ...\)"):
        make(tmp_path, reward=reward).train()


def test_a_reward_model_reads_messages_in_its_own_template(tmp_path):
    from transformers import LlamaConfig, LlamaForSequenceClassification

    judge = tiny_tokenizer()
    judge.chat_template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    seen = []
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=1,
        pad_token_id=2,
    )
    model = LlamaForSequenceClassification(config)
    model.register_forward_pre_hook(lambda m, a, k: seen.append(judge.decode(k["input_ids"][0])), with_kwargs=True)
    args = GRPOConfig(
        str(tmp_path),
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=4,
        max_steps=1,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
    )
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "hi"}]}])
    GRPOTrainer(
        tiny_llama(), model, args, rows, processing_class=tiny_tokenizer(), reward_processing_classes=judge
    ).train()
    assert seen[0].startswith("[user]hi[assistant]")


def test_rows_without_a_gradient_are_not_computed_and_the_gradient_is_the_same(tmp_path):
    """One group of two has no spread. With a KL weight of 1e-12 every row is computed; without, half at most.

    A group is a prompt of 3 tokens and 4 completions of 6, the last of which predicts nothing: 3 + 4 * 5 = 23.
    """

    def reward(prompts, completion_ids, **_):
        return [
            float(sum(ids) % 7) if prompt == PROMPTS[0]["prompt"] else 1.0
            for prompt, ids in zip(prompts, completion_ids, strict=True)
        ]

    gradients, tokens = [], []
    for beta in (0.0, 1e-12):
        trainer = make(tmp_path, reward, rows=PROMPTS[:2], beta=beta, max_steps=1, max_grad_norm=0.0)
        recorder = []
        trainer.model.register_forward_pre_hook(
            lambda m, a, k, seen=recorder: seen.append(k["input_ids"].numel()) if torch.is_grad_enabled() else None,
            with_kwargs=True,
        )
        inner = []

        class Gradients(TrainerCallback):
            def on_pre_optimizer_step(self, args, state, control, model=None, into=inner, **kwargs):
                into.append(torch.cat([p.grad.flatten() for p in model.parameters()]))

        trainer.add_callback(Gradients())
        trainer.train()
        gradients.append(inner[0])
        tokens.append(recorder[0])
    assert 3 + 5 <= tokens[0] <= 23  # a reward at the very mean of its group carries no gradient either
    assert tokens[1] == 2 * 23
    assert (gradients[0] - gradients[1]).norm() <= 1e-5 * gradients[1].norm()
    assert gradients[1].norm() > 0


@pytest.mark.parametrize(("when", "checks"), [("first_step", 1), ("never", 0), ("always", 4)])
def test_verify_packing_says_when_packed_rows_are_compared(tmp_path, monkeypatch, when, checks):
    compared = []
    monkeypatch.setattr(
        "grpo_trainer.trainer.check_packing", lambda model, batch, **kwargs: compared.append(len(batch))
    )
    make(
        tmp_path,
        by_place,
        verify_packing=when,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_tokens_per_microbatch=None,
    ).train()
    assert len(compared) == checks  # of 2 steps of 2 micro-batches


def test_rows_that_packing_would_change_are_not_trained_on(tmp_path, monkeypatch):
    from grpo_trainer.policy import attention

    whole = attention.make_plan
    monkeypatch.setattr(attention, "make_plan", lambda groups, **kwargs: whole(groups, **{**kwargs, "window": 2}))
    trainer = make(tmp_path)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    with pytest.raises(RuntimeError, match="LlamaForCausalLM differ by"):
        trainer.train()
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
