"""A run draws the same completions whatever the number of processes and the size of a micro-batch."""

from __future__ import annotations

import json

import torch


def drawn(out, world_size):
    """(step, prompt) -> the completions of its group, from all processes, in order."""
    groups = {}
    for rank in range(world_size):
        for line in (out / f"record{rank}.jsonl").read_text().splitlines():
            step, prompts, ids = json.loads(line)
            for prompt, completion in zip(prompts, ids, strict=True):
                groups.setdefault((step, prompt), []).append(completion)
    return {key: sorted(completions) for key, completions in groups.items()}


def test_completions_do_not_depend_on_how_a_rollout_is_dealt_out(runs, tmp_path):
    """8 completions a rollout: one process with micro-batches of 8, of 4, and two with 2; groups of 4."""
    layouts = {
        "one": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
        "cut": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
        "two": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "world_size": 2},
    }
    found = {}
    for name, settings in layouts.items():
        world_size = settings.pop("world_size", 1)
        short = {**settings, "max_steps": 3, "save_strategy": "no"}
        assert runs(tmp_path / name, settings=short, world_size=world_size) == [0] * world_size
        found[name] = drawn(tmp_path / name, world_size)
    assert len(found["one"]) == 6 and all(len(group) == 4 for group in found["one"].values())
    assert len({tuple(map(tuple, group)) for group in found["one"].values()}) == 6  # no group is another's
    assert found["cut"] == found["one"] and found["two"] == found["one"]


def test_dynamic_sampling_takes_the_same_groups_whatever_the_number_of_processes(runs, tmp_path):
    """4 of 7 prompts are silent, 2 groups a rollout; what waits is shared by all processes."""
    layouts = {"one": {"gradient_accumulation_steps": 2}, "two": {"gradient_accumulation_steps": 1, "world_size": 2}}
    found, weights = {}, {}
    for name, settings in layouts.items():
        world_size = settings.pop("world_size", 1)
        short = {**settings, "max_steps": 4, "save_strategy": "no", "dynamic_sampling": True}
        codes = runs(tmp_path / name, settings=short, world_size=world_size, silent="BDEF", plain=True)
        assert codes == [0] * world_size, "".join(p.read_text() for p in (tmp_path / name).glob("log*.txt"))
        found[name] = drawn(tmp_path / name, world_size)
        weights[name] = torch.load(tmp_path / name / "end0.pt", weights_only=False)["parameters"]
    assert found["one"] == found["two"]
    for name, weight in weights["one"].items():
        assert torch.allclose(weight, weights["two"][name], rtol=1e-4, atol=1e-6), name
