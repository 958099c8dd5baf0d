"""Reward functions in workers, as a training run meets them: the same run, trouble in sight, nothing left."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.types import Completions
from tests.helpers import tiny_llama, tiny_tokenizer

ROOT = Path(__file__).parents[1]
PROMPTS = [{"prompt": text, "answer": i} for i, text in enumerate(["one", "two", "three", "four", "five", "six"])]


def make_reward():
    """Made here, so that it is carried to a worker as a whole."""

    def letters(completions, answer, trainer_state, log_extra, log_metric, **kwargs):
        log_extra("first", [c[:1] for c in completions])
        log_metric("letters", sum(map(len, completions)) / len(completions))
        return [float(len(set(c)) + a + trainer_state.global_step) for c, a in zip(completions, answer, strict=True)]

    return letters


def make(folder, rewards, generator=None, reward_processing_classes=None, **settings):
    config = GRPOConfig(
        str(folder),
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
    rows = Dataset.from_list(PROMPTS)
    trainer = GRPOTrainer(
        tiny_llama(),
        rewards,
        config,
        rows,
        processing_class=tiny_tokenizer(),
        reward_processing_classes=reward_processing_classes,
    )
    if generator is not None:
        trainer.collector.generator = generator
    return trainer


def workers() -> list[int]:
    """The worker processes of this process; a library may have processes of its own."""
    running = psutil.Process().children(recursive=True)
    return [process.pid for process in running if any("rewards/worker.py" in word for word in process.cmdline())]


class Says:
    """Draws the same texts for every prompt."""

    def __init__(self, *texts):
        tokenizer = tiny_tokenizer()
        self.ids = [tuple(tokenizer(text)["input_ids"]) for text in texts]

    def generate(self, prompts, num_samples, sampling, *, seed, row_ids=None, observer=None):
        ids = tuple(self.ids[k % len(self.ids)] for n in num_samples for k in range(n))
        return Completions(ids=ids, finished=(True,) * len(ids))


@pytest.mark.parametrize(
    "options", [{}, {"rows_per_call": 3, "time_limit": 60}, {"group": True}, {"cache": True}], ids=str
)
def test_a_run_with_workers_is_the_run_without(tmp_path, options):
    def run(folder, **settings):
        trainer = make(
            folder, [make_reward(), make_reward()], log_completions=True, reward_weights=[1.0, 0.5], **settings
        )
        trainer.train()
        weights = [p.detach().clone() for p in trainer.model.parameters()]
        table = pq.read_table(folder / "completions/completions_00002.parquet").to_pydict()
        return [e for e in trainer.state.log_history if "loss" in e], weights, table

    logs, weights, table = run(tmp_path / "here")
    ours, same, seen = run(
        tmp_path / "there",
        reward_options={"letters": {"isolation": "process", **options}, "letters_2": {"group": True}},
    )
    assert all(a.equal(b) for a, b in zip(weights, same, strict=True))
    for here, there in zip(logs, ours, strict=True):
        assert there.pop("rewards/letters/errors") == there.pop("rewards/letters/timeouts") == 0.0
        timings = re.compile("time|second")
        kept = {k: v for k, v in here.items() if not timings.search(k) and k != "letters"}
        assert kept == {k: v for k, v in there.items() if not timings.search(k) and k != "letters"}
    assert seen.pop("letters_trouble") == [None] * 8
    assert seen == table


@pytest.mark.parametrize("settings", [{}, {"dynamic_sampling": True, "temperature": 2.0}], ids=str)
def test_a_run_whose_groups_are_judged_while_others_are_drawn_is_the_run_that_waits(tmp_path, settings, monkeypatch):
    early: list[int] = []

    async def judge(completions, answer, log_extra, log_metric, **kwargs):
        await asyncio.sleep(0)
        early.append(threading.current_thread() is not threading.main_thread())
        log_extra("first", [c[:1] for c in completions])
        log_metric("letters", sum(map(len, completions)))
        return [float(len(set(c)) + a) for c, a in zip(completions, answer, strict=True)]

    def run(folder):
        early.clear()
        trainer = make(
            folder,
            [judge, make_reward()],
            log_completions=True,
            reward_options={"judge": {"group": True}},
            **settings,
        )
        trainer.train()
        evaluated = trainer.evaluate(trainer.train_dataset)
        weights = [p.detach().clone() for p in trainer.model.parameters()]
        table = pq.read_table(folder / "completions/completions_00002.parquet").to_pydict()
        timings = re.compile("time|second")
        logs = [{k: v for k, v in e.items() if not timings.search(k)} for e in [*trainer.state.log_history, evaluated]]
        figures = [e for e in trainer.state.log_history if "step_time" in e]
        return logs, weights, table, all(early), [e["time/rewards_hidden"] for e in figures]

    logs, weights, table, all_early, hidden = run(tmp_path / "early")
    assert all_early and min(hidden) > 0
    monkeypatch.setattr("grpo_trainer.rewards.overlap.ScoredWhileDrawn.observer", lambda self, inner: inner)
    late, same, seen, any_early, nothing = run(tmp_path / "late")
    assert not any_early and nothing == [0.0] * 2
    assert (late, seen) == (logs, table) and all(a.equal(b) for a, b in zip(weights, same, strict=True))
    assert not any(thread.name == "rewards" for thread in threading.enumerate())


def test_workers_are_there_from_the_start_and_gone_at_the_end(tmp_path):
    threads = threading.active_count()
    trainer = make(tmp_path, make_reward(), reward_options={"letters": {"isolation": "process"}})
    trainer.train()
    assert (workers(), threading.active_count()) == ([], threads)
    trainer.sample(trainer.train_dataset, 2)  # starts new ones
    assert workers()
    del trainer
    gc.collect()
    assert (workers(), threading.active_count()) == ([], threads)


def test_trouble_is_counted_per_rollout_and_stands_in_the_table(tmp_path):
    def make_bad():
        import os

        def bad(completions, **kwargs):
            if "loop" in completions:
                while True:
                    pass
            if "die" in completions:
                os._exit(3)
            return [float(len(c)) for c in completions]

        return bad

    options = {"isolation": "process", "time_limit": 0.5, "rows_per_call": 2, "on_error": -1}
    trainer = make(
        tmp_path,
        make_bad(),
        generator=Says("a", "loop", "die", "bbb"),
        reward_options={"bad": options},
        log_completions=True,
        max_steps=1,
    )
    trainer.train()
    (log,) = [e for e in trainer.state.log_history if "loss" in e]
    assert (log["rewards/bad/timeouts"], log["rewards/bad/errors"]) == (2.0, 2.0)
    assert log["reward"] == pytest.approx((1 + 3 - 1) / 3)  # None does not count, -1 does
    (file,) = (tmp_path / "completions").glob("*.parquet")
    table = pq.read_table(file).to_pydict()
    assert table["bad"] == [1.0, None, -1.0, 3.0] * 2
    said = "no reward within time_limit=0.5 s"
    assert table["bad_trouble"] == [None, said, "it ended itself with exit code 3", None] * 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"lettres": {}},
            r"reward_options names 'lettres', but the reward functions are letters\. Did you mean 'letters'",
        ),
        (
            {"letters": {"timelimit": 1}},
            r"reward_options\['letters'\] has no option 'timelimit'\. Did you mean 'time_limit'",
        ),
        (
            {"letters": {"time_limit": 1}},
            r"reward_options\['letters'\]: time_limit and memory_limit hold in a worker only",
        ),
        ({"letters": "process"}, r"reward_options\['letters'\] is 'process'; give a mapping"),
        ("isolation", r"reward_options='isolation' is not JSON"),
        ({"letters": {"group": True, "rows_per_call": 2}}, r"rows_per_call=2 would cut it"),
    ],
    ids=str,
)
def test_options_that_are_not_legal_are_refused_when_the_trainer_is_made(tmp_path, options, said):
    with pytest.raises(ValueError, match=said):
        make(tmp_path, make_reward(), reward_options=options)
    assert workers() == []


def test_a_reward_model_stays_on_the_trainers_device(tmp_path):
    from transformers import LlamaConfig, LlamaForSequenceClassification

    tokenizer = tiny_tokenizer()
    small = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_labels=1)
    model = LlamaForSequenceClassification(LlamaConfig(vocab_size=len(tokenizer), pad_token_id=0, **small))
    options = {"LlamaForSequenceClassification": {"isolation": "process"}}
    with pytest.raises(ValueError, match="a reward model is run on the trainer's own device"):
        make(tmp_path, model, reward_processing_classes=tokenizer, reward_options=options)


def test_options_can_be_given_as_json():
    text = '{"f": {"isolation": "process", "time_limit": 2}}'
    config = GRPOConfig("out", reward_options=text, use_cpu=True, bf16=False)
    assert config.reward_options == {"f": {"isolation": "process", "time_limit": 2}}


# --- two processes ----------------------------------------------------------------------------------------------------

WORKER = Path(__file__).parent / "properties/reward_worker.py"


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """What each of two processes says of a run in which the reward of one comes to grief, by case.

    A collective gives up after half an hour, so that a run that waits for it runs into the time limit here.
    """
    out = tmp_path_factory.mktemp("two")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        str(WORKER),
        str(out),
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    facts = [json.loads((out / f"rank{r}.json").read_text()) for r in range(2)]
    assert all(f["world_size"] == 2 for f in facts)
    return facts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("raises", "reward function 'bad' raised KeyError: 'nothing here'"),
        ("inline", "KeyError: 'nothing here'"),
        ("segfault", "reward function 'bad': it was killed by SIGSEGV"),
        ("native loop", "reward function 'bad': no reward within time_limit=1 s"),
    ],
)
def test_a_reward_that_fails_on_one_process_ends_all_with_its_message(two_processes, case, said):
    zero, one = (facts[case] for facts in two_processes)
    assert said.removeprefix("KeyError: ") in one["error"]
    assert "process 1 failed while collecting a rollout" in zero["error"] and said in zero["error"]
    assert zero["workers"] == one["workers"] == 0


@pytest.mark.slow
def test_trouble_is_counted_over_all_processes(two_processes):
    figures = two_processes[0]["counted"]["log"]
    # each process holds 4 completions of a rollout, of which the second process's give no reward
    assert figures["rewards/bad/errors"] == 4.0
    assert figures["rewards/bad/timeouts"] == 0.0
    assert not math.isnan(figures["reward"])


@pytest.mark.slow
def test_a_group_that_is_spread_over_processes_is_refused_to_a_function_that_asks_for_it(two_processes):
    for facts in two_processes:
        assert (
            "'bad' asks for whole groups (group=True), but process 0 of 2 holds a part of one"
            in facts["split"]["error"]
        )
