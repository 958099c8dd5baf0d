"""Checkpoints on disk: what is found, what is refused, and what is read back."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest
import torch

from grpo_trainer.checkpoint import (
    RunState,
    changed_settings,
    checkpoints,
    clear_unfinished,
    find_checkpoint,
    save_settings,
    sole_run,
    writing,
)
from grpo_trainer.types import RolloutBatch


def put(folder, step, *files):
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    for name in files or ("trainer_state.json", "optimizer.pt"):
        (path / name).write_text("{}")
    return str(path)


def test_the_last_checkpoint_is_the_one_of_the_highest_step(tmp_path):
    put(tmp_path, 9), put(tmp_path, 10), put(tmp_path, 8)
    assert find_checkpoint(tmp_path, True) == str(tmp_path / "checkpoint-10")


def test_a_checkpoint_without_its_last_file_is_not_one(tmp_path):
    put(tmp_path, 4)
    put(tmp_path, 6, "model.safetensors", "optimizer.pt")
    assert checkpoints(tmp_path) == [str(tmp_path / "checkpoint-4")]


@pytest.mark.parametrize("wanted", [None, False])
def test_nothing_is_looked_for_that_is_not_asked_for(tmp_path, wanted):
    put(tmp_path, 4)
    assert find_checkpoint(tmp_path, wanted) is None


def test_there_is_none_in_a_fresh_folder(tmp_path):
    assert find_checkpoint(tmp_path / "nowhere", True) is None


def test_a_folder_that_is_no_checkpoint_is_refused_with_those_that_are(tmp_path):
    put(tmp_path, 4)
    with pytest.raises(ValueError, match=r"no such folder; the checkpoints in .*: checkpoint-4"):
        find_checkpoint(tmp_path, str(tmp_path / "checkpoint-5"))
    with pytest.raises(ValueError, match=r"is no checkpoint, since it holds no trainer_state.json"):
        find_checkpoint(tmp_path, tmp_path)


def test_weights_alone_are_refused_with_what_to_do_with_them(tmp_path):
    only = put(tmp_path, 4, "trainer_state.json", "model.safetensors")
    with pytest.raises(ValueError, match=r"no optimizer state \(save_only_model=True\).*as the model"):
        find_checkpoint(tmp_path, only)


def test_a_checkpoint_appears_when_it_is_complete(tmp_path):
    final = tmp_path / "checkpoint-2"
    with writing(final) as draft:
        (draft / "trainer_state.json").write_text("{}")
        assert checkpoints(tmp_path) == [] and not final.exists()
    assert checkpoints(tmp_path) == [str(final)]
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-2"]


def test_a_checkpoint_that_fails_half_way_leaves_the_one_before_it(tmp_path):
    final = tmp_path / "checkpoint-2"
    with writing(final) as draft:
        (draft / "trainer_state.json").write_text("old")
    with pytest.raises(OSError, match="disk"), writing(final) as draft:
        (draft / "trainer_state.json").write_text("new")
        raise OSError("disk full")
    assert (final / "trainer_state.json").read_text() == "old"
    clear_unfinished(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-2"]


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    final = tmp_path / "checkpoint-2"
    for text in ("old", "new"):
        with writing(final) as draft:
            (draft / "trainer_state.json").write_text(text)
    assert (final / "trainer_state.json").read_text() == "new"


@pytest.mark.parametrize("killed_at", [1, 2])
def test_a_kill_while_a_checkpoint_is_replaced_leaves_one_of_the_two(tmp_path, monkeypatch, killed_at):
    final = tmp_path / "checkpoint-2"
    with writing(final) as draft:
        (draft / "trainer_state.json").write_text("old")
    renames, rename = [], os.rename

    def until_killed(*paths):
        renames.append(paths)
        if len(renames) == killed_at:
            raise SystemExit
        rename(*paths)

    with monkeypatch.context() as patch, pytest.raises(SystemExit), writing(final) as draft:
        (draft / "trainer_state.json").write_text("new")
        patch.setattr(os, "rename", until_killed)
    assert final.exists() == (killed_at == 1)
    clear_unfinished(tmp_path)
    assert (final / "trainer_state.json").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-2"]


def test_all_of_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    flushed, fsync = [], os.fsync

    def note(handle):
        flushed.append(os.fstat(handle).st_ino)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", note)
    with writing(tmp_path / "checkpoint-2") as draft:
        (draft / "model").mkdir()
        (draft / "model" / "weights").write_text("1")
        (draft / "trainer_state.json").write_text("{}")
    final = tmp_path / "checkpoint-2"
    assert set(flushed[:-2]) == {path.stat().st_ino for path in final.rglob("*")}
    assert flushed[-2:] == [final.stat().st_ino, tmp_path.stat().st_ino]


def test_two_runs_do_not_share_a_folder_and_a_lock_ends_with_its_process(tmp_path):
    inside = f"with sole_run({str(tmp_path)!r}): print('in', flush=True); input()"
    held = f"from grpo_trainer.checkpoint import sole_run\n{inside}"
    with subprocess.Popen([sys.executable, "-c", held], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"in\n"
        with (
            pytest.raises(ValueError, match=r"output_dir=.*in use by another run.*another output_dir"),
            sole_run(tmp_path),
        ):
            pass
        other.kill()
    with sole_run(tmp_path):
        pass
    with sole_run(tmp_path):
        pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ValueError, match=r"output_dir=.*file/out.*cannot be written to"),
        sole_run(tmp_path / "file/out"),
    ):
        pass


def test_a_run_state_reads_back_as_it_was(tmp_path):
    batch = RolloutBatch(
        prompt_ids=(torch.tensor([1, 2]), torch.tensor([3])),
        prompt_of_row=(0, 1, 1),
        lengths=(2, 0, 1),
        completion_ids=torch.tensor([[4, 5], [0, 0], [6, 0]]),
        mask=torch.tensor([[True, True], [False, False], [True, False]]),
        advantages=torch.tensor([0.5, -1.0, 2.0]),
        old_logprobs=torch.rand(3, 2),
    )
    other = dataclasses.replace(batch, advantages=torch.zeros(3))
    metrics = {"means": {"kl": (0.1, 3.0)}, "extremes": {("length", "max"): 7.0}, "latest": {"num_tokens": 5}}
    state = RunState(
        pending=[batch, other, batch],
        metrics=metrics,
        loss=0.1,
        last_logged=3,
        loss_total=1 / 3,
        losses_since=1,
        reference={"w": torch.ones(2)},
        entropy_bonus={"coefficient": 0.05, "last_entropy": float("inf")},
    )
    state.save(tmp_path, 1)
    back = RunState.load(tmp_path, 1)
    for f in dataclasses.fields(batch):
        for given, read in zip(state.pending, back.pending, strict=True):
            a, b = getattr(given, f.name), getattr(read, f.name)
            same = torch.equal(a, b) if isinstance(a, torch.Tensor) else None
            if isinstance(a, tuple) and isinstance(a[0], torch.Tensor):
                same = all(map(torch.equal, a, b))
            assert same if same is not None else a == b, f.name
    assert back.pending[0] is back.pending[2]  # a second pass over a rollout costs no memory
    assert (back.metrics, back.loss, back.last_logged) == (metrics, 0.1, 3)
    assert (back.loss_total, back.losses_since) == (1 / 3, 1)
    assert torch.equal(back.reference["w"], torch.ones(2))
    assert back.entropy_bonus == state.entropy_bonus


def test_changed_settings_are_named_with_both_values(tmp_path):
    save_settings(tmp_path, {"beta": 0.1, "seed": 1, "targets": ("q", "v"), "gone": 1})
    now = {"beta": 0.2, "seed": 1, "targets": ["q", "v"], "new": None}
    assert changed_settings(tmp_path, now) == {"beta": (0.1, 0.2), "gone": (1, None)}
    assert changed_settings(tmp_path / "elsewhere", now) == {}
