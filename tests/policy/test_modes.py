from __future__ import annotations

import contextlib

import pytest
from torch import nn

from grpo_trainer.policy.modes import eval_mode


@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
def test_every_module_evaluates_inside_and_is_as_before_afterwards(fails):
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout(), nn.Linear(1, 1)))
    model.train()
    model[1][0].eval()  # one part is frozen
    before = [module.training for module in model.modules()]
    with pytest.raises(KeyError) if fails else contextlib.nullcontext(), eval_mode(model):
        assert not any(module.training for module in model.modules())
        if fails:
            raise KeyError
    assert [module.training for module in model.modules()] == before
