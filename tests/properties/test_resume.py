"""A run that is killed and goes on from its last complete checkpoint ends as the run that was never killed.

Bit for bit: parameters, optimizer, random states, prompts, completions, rewards and all that is logged. The runs are
killed with SIGKILL at events drawn by a seed: while generating, while scoring, in a micro-step, and half-way through
writing a file of a checkpoint.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

# 7 prompts; a rollout of 3 micro-batches is used twice, in optimizer steps of 2 micro-batches: rollouts straddle steps,
# and a checkpoint every 2 steps lies inside a rollout. Two epochs and more.
STRADDLING = {"steps_per_generation": 3, "gradient_accumulation_steps": 2, "num_iterations": 2}
CASES = {
    "straddling": {"settings": STRADDLING},
    "on policy, reference, adaptive entropy": {
        "settings": {
            "gradient_accumulation_steps": 2,
            "beta": 0.1,
            "kl_target": 1e-3,
            "use_adaptive_entropy": True,
            "entropy_target": 6.0,  # above what 256 tokens can have: the weight rises with every step
        }
    },
    "straddling, KL in the reward, adaptive, corrected": {
        "settings": {
            **STRADDLING,
            "beta": 0.5,
            "kl_placement": "reward",
            "kl_target": 1e-3,
            "sampler_correction": True,
            "vllm_importance_sampling_mode": "token_truncate",
        }
    },
    # the groups of 5 of the 7 prompts are silent: rollouts take a round or several, and groups wait
    "dynamic sampling": {
        "settings": {
            "gradient_accumulation_steps": 2,
            "dynamic_sampling": True,
            "max_steps": 7,
            "prompt_sampling": "variance",
        },
        "silent": "BCDEF",
    },
    "dynamic sampling, stream, two processes": {
        "settings": {"gradient_accumulation_steps": 2, "dynamic_sampling": True, "max_steps": 7},
        "silent": "BDF",
        "stream": True,
        "world_size": 2,
    },
    "stream": {"settings": {**STRADDLING, "max_steps": 11}, "stream": True},
    "lora": {"settings": {**STRADDLING, "beta": 0.1}, "lora": True},
    "two processes": {"settings": STRADDLING, "world_size": 2},
}


def end(out: Path, rank: int = 0) -> dict:
    return torch.load(out / f"end{rank}.pt", weights_only=False)


def completions(out: Path, rank: int = 0) -> dict[int, list]:
    """Optimizer step -> what was scored for it; of a step that was done again, what was scored last."""
    lines = map(json.loads, (out / f"record{rank}.jsonl").read_text().splitlines())
    return {step: [prompts, ids] for step, prompts, ids in lines}


def logs(out: Path) -> str:
    return "".join(path.read_text() for path in sorted(out.glob("log*.txt")))


def assert_equal(a, b, where="") -> None:
    assert type(a) is type(b), where
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_equal(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_equal(x, y, f"{where}/{i}")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    else:
        assert a == b or (a != a and b != b), (where, a, b)


def assert_same_run(whole: Path, parts: Path, world_size: int) -> None:
    for rank in range(world_size):
        for name in ("parameters", "optimizer", "logs", "rng"):
            assert_equal(end(whole, rank)[name], end(parts, rank)[name], f"rank {rank}: {name}")
        assert completions(whole, rank) == completions(parts, rank)
    tables = [{p.name: p.read_bytes() for p in (out / "run/completions").iterdir()} for out in (whole, parts)]
    assert tables[0] == tables[1]


def whole_run(runs, tmp_path_factory, case: str) -> Path:
    """The folder of the run that nothing happens to, made by whoever asks first."""
    job, whole = CASES[case], tmp_path_factory.getbasetemp() / f"whole {case}"
    if not whole.exists():
        assert runs(whole, **job) == [0] * job.get("world_size", 1), logs(whole)
    return whole


@pytest.mark.parametrize(
    ("case", "seed"),
    [pytest.param(case, seed, marks=[pytest.mark.slow] * (seed > 0)) for seed in range(4) for case in CASES],
)
def test_a_killed_run_ends_as_if_it_had_not_been(runs, tmp_path_factory, case, seed):
    job = CASES[case]
    world_size = job.get("world_size", 1)
    whole = whole_run(runs, tmp_path_factory, case)
    draw = random.Random(f"{case} {seed}")
    events, saves = end(whole)["events"], end(whole)["saves"]
    # once anywhere, and once more, in a checkpoint that is being written
    first = draw.randint(1, events)
    parts = tmp_path_factory.mktemp("parts")
    assert runs(parts, **job, kill=first)[0] == -9, logs(parts)
    second = draw.choice(saves[: max(1, len(saves) // 2)])
    codes = runs(parts, **job, kill=second, resume=True)
    assert codes[0] in (-9, 0), logs(parts)  # 0 if so little was left that it was over before
    if codes[0]:
        assert runs(parts, **job, resume=True) == [0] * world_size, logs(parts)
    assert_same_run(whole, parts, world_size)
    assert not (parts / "run/_unfinished").exists()


LEAVES_WITH = {"SIGTERM": 143, "SIGINT": 130}
"""A signal that asks a run to stop, and the code with which it leaves; SIGINT on the command line only."""


@pytest.mark.parametrize("signal", LEAVES_WITH)
@pytest.mark.parametrize("case", ["straddling", "two processes"])
def test_a_run_told_to_stop_saves_and_leaves_with_its_own_code(runs, tmp_path_factory, case, signal):
    """Of two processes SIGTERM reaches one and Ctrl-C both, twice: they agree on where to stop, whoever was told."""
    job, world_size = CASES[case], CASES[case].get("world_size", 1)
    whole, parts = whole_run(runs, tmp_path_factory, case), tmp_path_factory.mktemp("parts")
    settings = {**job["settings"], "save_strategy": "no"}
    codes = runs(parts, **{**job, "settings": settings}, signal=signal, told_in_step=3)
    assert codes == [LEAVES_WITH[signal]] * world_size, logs(parts)
    assert [p.name for p in (parts / "run").glob("checkpoint-*")] == ["checkpoint-4"]
    assert runs(parts, **job, resume=True) == [0] * world_size, logs(parts)
    assert_same_run(whole, parts, world_size)


@pytest.mark.parametrize("signal", LEAVES_WITH)
@pytest.mark.parametrize("strategy", ["best", "steps"])
def test_a_run_told_to_stop_saves_whatever_else_decides_about_saving(runs, tmp_path, signal, strategy):
    """The best is an earlier step, and only the best is kept; the step after which it stops is evaluated."""
    best = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "eval_reward", "save_total_limit": 1}
    best |= {"save_strategy": strategy, "save_only_model": True, "load_best_model_at_end": strategy == "steps"}
    job = {"settings": best, "evaluates": True}
    assert runs(tmp_path, **job, signal=signal, told_in_step=3) == [LEAVES_WITH[signal]], logs(tmp_path)
    assert (tmp_path / "run/checkpoint-4/optimizer.pt").is_file()
    assert runs(tmp_path, **job, resume=True) == [0], logs(tmp_path)


def test_a_finished_run_that_is_resumed_does_nothing_more(runs, tmp_path):
    job = {"settings": {**STRADDLING, "max_steps": 2}}
    assert runs(tmp_path, **job) == [0]
    before, scored = end(tmp_path)["parameters"], len((tmp_path / "record0.jsonl").read_text())
    assert runs(tmp_path, **job, resume=True) == [0], logs(tmp_path)
    assert_equal(before, end(tmp_path)["parameters"])
    assert len((tmp_path / "record0.jsonl").read_text()) == scored
    assert [p.name for p in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-2"]


def test_a_resume_says_which_settings_are_not_what_they_were(runs, tmp_path):
    job = {"settings": {"lr_scheduler_type": "constant", "max_steps": 2}}
    assert runs(tmp_path, **job) == [0]
    longer = {"lr_scheduler_type": "constant", "max_steps": 4}
    assert runs(tmp_path, settings={**longer, "temperature": 0.5}, resume=True) == [0], logs(tmp_path)
    warnings = [line for line in logs(tmp_path).splitlines() if "when" in line and "was written" in line]
    assert len(warnings) == 1  # a longer run under a constant rate is the same run
    assert warnings[0].startswith("temperature was 1.3 when") and "is 0.5 now" in warnings[0]


def test_a_rollout_that_waits_is_drawn_afresh_if_the_batches_are_cut_otherwise(runs, tmp_path):
    assert runs(tmp_path, settings={**STRADDLING, "max_steps": 2}) == [0]
    other = {**STRADDLING, "steps_per_generation": 2, "max_steps": 4}
    assert runs(tmp_path, settings=other, resume=True) == [0], logs(tmp_path)
    assert "steps_per_generation was 3" in logs(tmp_path)
