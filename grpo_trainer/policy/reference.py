"""The reference policy: what the policy was when it was handed in, frozen.

Which of three ways keeps it depends on what is trained. A full model is copied. An adapter that starts out as a zero
is switched off. Any other adapter is remembered: its tensors, a few megabytes, are put in place of the current ones
for the time of the pass.

A reference can follow the policy (``sync``): θ_ref ← α θ + (1 − α) θ_ref. Of an adapter these are its own parameters.
For the two factors of LoRA, with Δ for what the policy is beyond the reference,

    B_ref A_ref ← α B A + (1 − α) B_ref A_ref − α (1 − α) ΔB ΔA,

so the reference keeps the rank of the adapter, is exactly the policy for α = 1, and otherwise differs from the mixture
of the weights by a product of two differences.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from grpo_trainer.policy.modes import eval_mode


class FrozenCopy:
    """A copy of a model, made now; ``sync`` alone changes it.

    Args:
        model: the policy, before anything wrapped it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = copy.deepcopy(model).eval().requires_grad_(False)
        self._moved = False

    @contextlib.contextmanager
    def activate(self) -> Iterator[nn.Module]:
        """Yields the copy."""
        yield self._model

    def sync(self, model: nn.Module, alpha: float) -> None:
        """Moves the copy towards the policy: θ_ref ← α θ + (1 − α) θ_ref.

        Args:
            model: the policy, unwrapped.
            alpha: α in (0, 1]; 1 makes the copy equal to the policy.
        """
        _mix(self._weights(), dict(model.named_parameters()), alpha)
        self._moved = True

    def state_dict(self) -> dict[str, Tensor]:
        """What a checkpoint has to hold: the weights by name, nothing while they are those of the start."""
        return self._weights() if self._moved else {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Takes up the weights of a checkpoint.

        Args:
            state: of ``state_dict``; nothing leaves the copy as it is.

        Raises:
            ValueError: if it is of another model.
        """
        if state:
            _put(state, self._weights())
            self._moved = True

    def _weights(self) -> dict[str, Tensor]:
        """The weights themselves; those in few bits are never trained, so they cannot be mixed and need not be."""
        return {name: p.data for name, p in self._model.named_parameters() if p.is_floating_point()}


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

    def sync(self, model: nn.Module, alpha: float) -> None:
        """Refuses: what lies below the adapter cannot move.

        Args:
            model: not used.
            alpha: not used.

        Raises:
            ValueError: always.
        """
        raise ValueError("a reference that is the model without its adapter cannot move; make it with moves=True")

    def state_dict(self) -> dict[str, Tensor]:
        """Nothing: the weights are the model's own."""
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Refuses the state of a reference that has moved.

        Args:
            state: of ``state_dict``.

        Raises:
            ValueError: if it is not empty.
        """
        if state:
            raise ValueError(
                f"the checkpoint holds {len(state)} tensors of a reference that followed the policy, but here it is "
                "the model without its adapter, which cannot move: set sync_ref_model=True, as in that run"
            )


class AdapterSnapshot:
    """The model with its adapter's weights of now; ``sync`` alone changes them.

    Args:
        model: with an adapter that has been trained, or whose reference is to move.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._then = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        self._moved = False

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

    def sync(self, model: nn.Module, alpha: float) -> None:
        """Moves the adapter's weights towards those of the policy: θ_ref ← α θ + (1 − α) θ_ref.

        Args:
            model: the policy, unwrapped.
            alpha: α in (0, 1]; 1 makes the reference equal to the policy.
        """
        _mix(self._then, dict(model.named_parameters()), alpha)
        self._moved = True

    def state_dict(self) -> dict[str, Tensor]:
        """What a checkpoint has to hold: the adapter's weights by name, nothing while they are those of the start."""
        return dict(self._then) if self._moved else {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Takes up the adapter's weights of a checkpoint.

        Args:
            state: of ``state_dict``; nothing leaves them as they are.

        Raises:
            ValueError: if it is of another adapter.
        """
        if state:
            _put(state, self._then)
            self._moved = True


def make_reference(
    model: nn.Module, *, handed_in_as_peft: bool, moves: bool = False
) -> FrozenCopy | AdapterOff | AdapterSnapshot:
    """The reference of a policy.

    Args:
        model: the policy, on its device, before anything is wrapped around it for training.
        handed_in_as_peft: whether the user's model brought its adapter along.
        moves: whether it will follow the policy. Under a new adapter it then cannot be the model without it.

    Returns:
        The reference.
    """
    if not hasattr(model, "disable_adapter"):
        return FrozenCopy(model)
    if moves or handed_in_as_peft or not _adds_nothing(model):
        return AdapterSnapshot(model)
    return AdapterOff(model)


@torch.no_grad()
def _mix(reference: dict[str, Tensor], policy: dict[str, nn.Parameter], alpha: float) -> None:
    """θ_ref ← θ_ref + α (θ − θ_ref), in place, in float32 or wider and rounded once; what is equal stays as it is."""
    for name, theirs in reference.items():
        ours = policy[name].detach().to(theirs.device)
        wide = torch.promote_types(torch.promote_types(theirs.dtype, ours.dtype), torch.float32)
        theirs.copy_(ours if alpha == 1.0 else theirs.to(wide).lerp(ours.to(wide), alpha))


@torch.no_grad()
def _put(state: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
    """Copies tensors of a checkpoint into weights of the same names and shapes."""
    odd = [n for n in {**weights, **state} if n not in weights or n not in state or weights[n].shape != state[n].shape]
    if odd:
        raise ValueError(
            f"the checkpoint holds the reference of another model: {len(odd)} of {len(weights)} tensors, such as "
            f"{odd[0]}, differ in name or shape. Give the model and the adapter settings of the run that wrote it"
        )
    for name, tensor in state.items():
        weights[name].copy_(tensor)


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
