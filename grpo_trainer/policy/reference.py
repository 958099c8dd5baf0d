"""The reference policy: what the policy was when it was handed in, frozen.

Which of three ways keeps it depends on what is trained. A full model is copied. An adapter that starts out as a zero
is switched off. Any other adapter is remembered: its tensors, a few megabytes, are put in place of the current ones
for the time of the pass.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from grpo_trainer.policy.modes import eval_mode


class FrozenCopy:
    """A copy of a model, made now and never changed.

    Args:
        model: the policy, before anything wrapped it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = copy.deepcopy(model).eval().requires_grad_(False)

    @contextlib.contextmanager
    def activate(self) -> Iterator[nn.Module]:
        """Yields the copy."""
        yield self._model


class AdapterOff:
    """The model below a new adapter.

    Args:
        model: with an adapter that does not change its output yet.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    @contextlib.contextmanager
    def activate(self) -> Iterator[nn.Module]:
        """Yields the model in eval mode with its adapter off; on and as before afterwards."""
        # switching an adapter on makes all of it trainable, also what was frozen
        trained = [(parameter, parameter.requires_grad) for parameter in self._model.parameters()]
        try:
            with eval_mode(self._model), self._model.disable_adapter():
                yield self._model
        finally:
            for parameter, flag in trained:
                parameter.requires_grad_(flag)


class AdapterSnapshot:
    """The model with its adapter's weights of now.

    Args:
        model: with an adapter that has been trained.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._then = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}

    @contextlib.contextmanager
    def activate(self) -> Iterator[nn.Module]:
        """Yields the model in eval mode with the weights of then; the very tensors of before are back afterwards."""
        parameters = {name: p for name, p in self._model.named_parameters() if name in self._then}
        now = {name: p.data for name, p in parameters.items()}
        with eval_mode(self._model):
            try:
                for name, parameter in parameters.items():
                    parameter.data = self._then[name].to(parameter.device)
                yield self._model
            finally:
                for name, parameter in parameters.items():
                    parameter.data = now[name]


def make_reference(model: nn.Module, *, handed_in_as_peft: bool) -> FrozenCopy | AdapterOff | AdapterSnapshot:
    """The reference of a policy.

    Args:
        model: the policy, on its device, before anything is wrapped around it for training.
        handed_in_as_peft: whether the user's model brought its adapter along.

    Returns:
        The reference.
    """
    if not hasattr(model, "disable_adapter"):
        return FrozenCopy(model)
    return AdapterSnapshot(model) if handed_in_as_peft or not _adds_nothing(model) else AdapterOff(model)


def _adds_nothing(model: nn.Module) -> bool:
    """Whether a new adapter leaves the model's output as it was: LoRA with one of its two factors zero everywhere.

    Some ways to start an adapter (PiSSA, LoftQ, random) change the model or its output at once, so that the model
    without the adapter is not what was handed in.
    """
    factor = re.compile(r"\.lora_(?:embedding_)?[AB]\.")
    zero: dict[str, bool] = {}
    for name, parameter in model.named_parameters():
        # a layer trained as a whole starts as a copy of the one below, and a magnitude as the norm of its weight
        if not parameter.requires_grad or ".modules_to_save." in name or ".lora_magnitude_vector." in name:
            continue
        if ".lora_" not in name:  # trained in place, such as a bias: switching the adapter off would not undo it
            return False
        pair = factor.sub(".lora.", name)
        zero[pair] = zero.get(pair, False) or not bool(parameter.detach().any())
    return all(zero.values())
