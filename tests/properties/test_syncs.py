"""The update asks the device for nothing: a value that the host waits for would stop it at every pass."""

from __future__ import annotations

import collections

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from grpo_trainer.policy import attention
from tests.test_trainer import by_place, make

# Operators whose result, or the shape of it, the host has to wait for.
WAITS = {
    "aten::_local_scalar_dense",  # item(), tolist(), bool(), int(), float()
    "aten::is_nonzero",
    "aten::nonzero",  # and indexing by a mask, which calls it
    "aten::masked_select",
    "aten::equal",
    "aten::unique_dim",
    "aten::_unique2",
    "aten::allclose",
    "aten::repeat_interleave.Tensor",
}


class Waits(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name()
        by_mask = name.startswith("aten::index") and any(
            isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8)
            for arg in args
            if isinstance(arg, (list, tuple))
            for i in arg
        )
        if name in WAITS or name.split(".")[0] in WAITS or by_mask:
            self.found[name] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"beta": 0.1},
        {"num_iterations": 2},
        {"loss_type": "grpo", "mask_truncated_completions": True},
        {"importance_sampling_level": "sequence", "delta": 2.0},
        {"entropy_coef": 0.1},
        {"sampler_correction": True},
    ],
    ids=lambda settings: ", ".join(settings) or "plain",
)
def test_no_pass_of_an_update_waits_for_the_device(settings, tmp_path, monkeypatch):
    plan = attention.make_plan

    def planned(segments, **kwargs):
        """From host numbers alone, so nothing in it can wait: it is left out of the count."""
        assert all(isinstance(number, int) for segment in segments for number in segment)
        with _disable_current_modes():
            return plan(segments, **kwargs)

    monkeypatch.setattr(attention, "make_plan", planned)
    trainer = make(
        tmp_path,
        by_place,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=4,
        max_tokens_per_microbatch=None,
        verify_packing="never",
        gradient_checkpointing=False,
        **settings,
    )
    seen = []
    inner = trainer.training_step

    def watched(*args, **kwargs):
        with Waits() as waits:
            out = inner(*args, **kwargs)
        seen.append(dict(waits.found))
        return out

    trainer.training_step = watched
    trainer.train()
    assert len(seen) == 4
    assert not any(seen[1:]), seen
    assert sum(seen[0].values()) <= 3  # what the model's head does with its logits is found out once


def test_what_waits_is_found():
    with Waits() as waits:
        mask = torch.tensor([True, False])
        mask.any().item()
        torch.ones(2)[mask]
        torch.ones(2).masked_select(mask)
        mask.nonzero()
    assert sum(waits.found.values()) == 4


def test_which_rows_are_computed_is_asked_once_a_step(tmp_path):
    trainer = make(tmp_path, by_place, gradient_accumulation_steps=4, per_device_train_batch_size=2)
    counts = []
    inner = trainer._arranged

    def watched(window):
        with Waits() as waits:
            out = inner(window)
        counts.append((len(window), sum(waits.found.values()), waits.found))
        return out

    trainer._arranged = watched
    trainer.train()
    # one list of advantages, a value each; on a device that is a single transfer
    assert [(n, found) for n, found, _ in counts] == [(4, 0), (4, 0)], counts
