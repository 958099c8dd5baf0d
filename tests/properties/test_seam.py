"""The seam into ``transformers.Trainer`` holds: two processes take the steps of one, on the same completions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("seam_worker.py")

TWICE = dict(gradient_accumulation_steps=2, steps_per_generation=4, num_iterations=2, num_train_epochs=2, beta=0.1)
CASES = {
    # 4 micro-batches per rollout, taken 2 at a time, twice over: 4 optimizer steps per rollout, 2 rollouts per epoch
    "dapo": {**TWICE, "loss_type": "dapo"},
    "grpo": {**TWICE, "loss_type": "grpo"},
    "dr_grpo": {**TWICE, "loss_type": "dr_grpo"},
    # neither divides the other, so steps straddle rollouts; 16 micro-steps per epoch, 3 a step, leave a last one of 1
    "straddling": {**TWICE, "gradient_accumulation_steps": 3},
    # the quantile is that of a micro-batch over all processes: with one micro-batch a step it has the same rows in both
    "pooled entropies, coefficients that move": dict(
        **{**TWICE, "num_train_epochs": 1, "gradient_accumulation_steps": 1},
        top_entropy_quantile=0.4,
        use_adaptive_entropy=True,
        entropy_coef=0.1,
        entropy_target=9.0,
        kl_target=1e-3,
    ),
    "KL in the reward, a sampler that is off": dict(
        **{**TWICE, "num_train_epochs": 1, "beta": 0.5},
        kl_placement="reward",
        kl_target=1e-3,
        sampler_correction=True,
        vllm_importance_sampling_mode="token_mask",
        vllm_importance_sampling_clip_max=1.1,
    ),
    # a step holds two rollouts, and no rollout outlives it
    "two rollouts a step": dict(
        gradient_accumulation_steps=4, steps_per_generation=2, num_iterations=1, num_train_epochs=1
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All cases, run by one process with 4 rows per micro-batch and by two with 2 rows each."""
    out = tmp_path_factory.mktemp("seam")
    for processes in (1, 2):
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        worker = [str(WORKER), str(out / str(processes)), json.dumps(CASES), str(4 // processes)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *(launcher if processes > 1 else []), *worker]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stderr[-3000:]
    return out


@pytest.fixture(params=CASES)
def runs(request, folder):
    one, two = (load(folder / str(processes) / request.param, processes) for processes in (1, 2))
    return CASES[request.param], [one, two]


def load(out, processes):
    facts = [json.loads((out / f"rank{r}.json").read_text()) for r in range(processes)]
    tensors = [torch.load(out / f"rank{r}.pt") for r in range(processes)]
    assert all(f["world_size"] == processes for f in facts)  # some launchers silently run one process
    return facts, tensors


def test_gradients_of_every_step_are_those_of_one_process(runs):
    _, ((facts, (one,)), (_, two)) = runs
    assert len(one["gradients"]) == facts[0]["steps"] > 0
    for step, expected in enumerate(one["gradients"]):
        scale = torch.cat([g.flatten() for g in expected.values()]).norm()
        assert scale > 0
        for rank in two:
            got = rank["gradients"][step]
            error = torch.cat([(got[n] - expected[n]).flatten() for n in expected]).norm()
            assert error <= 1e-5 * scale, f"step {step}: relative error {error / scale:.2e}"


def test_prompts_are_consumed_in_the_order_of_the_sampler(runs):
    settings, (one, two) = runs
    size = settings["steps_per_generation"]  # prompts of a rollout: 4 rows a micro-step, groups of 4
    for facts, _ in (one, two):
        expected = []
        for order in facts[0]["order"][: settings["num_train_epochs"]]:
            whole = len(order) // size * size
            expected += [order[i : i + size] for i in range(0, whole, size)]
        assert len(facts[0]["calls"]) == len(expected)
        for k, indices in enumerate(expected):
            asked = {tuple(prompt) for f in facts for prompt in f["calls"][k]}
            assert asked == {tuple(facts[0]["prompts"][i]) for i in indices}


def test_each_rollout_is_generated_once_and_used_num_iterations_times(runs):
    settings, (one, two) = runs
    for facts, _ in (one, two):
        for f in facts:
            slices = settings["steps_per_generation"]
            per_rollout = slices * settings["num_iterations"]
            assert len(f["used"]) == len(f["calls"]) * per_rollout
            for k in range(len(f["calls"])):
                used = f["used"][k * per_rollout : (k + 1) * per_rollout]
                for again in range(1, settings["num_iterations"]):
                    assert used[again * slices : (again + 1) * slices] == used[:slices]


def test_both_layouts_train_on_the_same_completions_step_by_step(runs):
    settings, ((one, _), (two, _)) = runs
    size = settings["gradient_accumulation_steps"]
    per_epoch = len(one[0]["used"]) // settings["num_train_epochs"]
    for epoch in range(settings["num_train_epochs"]):
        for start in range(0, per_epoch, size):
            window = slice(epoch * per_epoch + start, epoch * per_epoch + min(start + size, per_epoch))
            rows = [sorted(row for f in facts for micro in f["used"][window] for row in micro) for facts in (one, two)]
            assert rows[0] == rows[1]


def test_gradients_are_exchanged_once_per_step(runs):
    _, (_, (two, _)) = runs
    for f in two:
        steps = [step for step, synced in f["syncs"] if synced]
        assert steps == list(range(f["steps"]))


def test_logged_figures_do_not_depend_on_the_number_of_processes(runs):
    _, ((one, _), (two, _)) = runs
    assert len(one[0]["logs"]) == len(two[0]["logs"])
    for a, b in zip(one[0]["logs"], two[0]["logs"], strict=True):
        assert a.keys() == b.keys()
        per_micro_batch = {"clip_ratio/low_min", "clip_ratio/high_max"}
        for name in a.keys() - per_micro_batch - {"total_flos"}:  # which each process counts for itself
            assert b[name] == pytest.approx(a[name], rel=1e-4, abs=1e-6), name
