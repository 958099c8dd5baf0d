from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from grpo_trainer.generation import weights
from grpo_trainer.generation.weights import ready_weights
from tests import helpers


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_under_autocast_the_product_is_the_one_that_autocast_computes(monkeypatch, packs, frozen):
    monkeypatch.setattr(weights, "_can_pack", lambda: packs)
    convolution = Conv1D(80, 48)
    nn.init.normal_(convolution.bias)
    for layer in (nn.Linear(48, 80), nn.Linear(48, 80, bias=False), convolution):
        layer.requires_grad_(not frozen)
        for shape in [(1, 1, 48), (5, 1, 48), (2, 7, 48)]:
            x = torch.randn(shape)
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                expected = layer(x)
                with ready_weights(layer, passes=99):
                    assert ("forward" in vars(layer)) is (packs or frozen)
                    got = layer(x)
            assert got.dtype == expected.dtype == torch.bfloat16 and got.shape == expected.shape
            torch.testing.assert_close(got, expected, rtol=2**-7, atol=2**-9)  # one unit in the last place


def test_a_weight_is_cast_once_however_often_it_is_used(monkeypatch):
    layer = nn.Linear(8, 8).requires_grad_(False)
    for packs in (True, False):
        monkeypatch.setattr(weights, "_can_pack", lambda packs=packs: packs)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), ready_weights(layer, passes=99):
            with torch.profiler.profile() as seen:
                layer(torch.randn(3, 8))
                layer(torch.randn(3, 8))
            casts = [e for e in seen.events() if e.name == "aten::_to_copy"]
        assert len(casts) == 2  # of the inputs


def test_the_parameters_stay_what_they_are_also_when_interrupted():
    model = helpers.tiny_llama()
    before = [(name, id(p), p.dtype, p.data_ptr(), p._version) for name, p in model.named_parameters()]
    original = model.lm_head.forward.__func__
    with pytest.raises(KeyboardInterrupt), torch.autocast("cpu", torch.bfloat16), ready_weights(model, passes=99):
        assert [(name, id(p), p.dtype, p.data_ptr(), p._version) for name, p in model.named_parameters()] == before
        assert "forward" in vars(model.lm_head)
        raise KeyboardInterrupt
    assert not any("forward" in vars(module) for module in model.modules())
    assert model.lm_head.forward.__func__ is original


def test_what_fails_on_the_way_in_is_undone_as_well(monkeypatch):
    model = helpers.tiny_llama()
    calls = []

    def fail_at_the_third(module, packs):
        calls.append(module)
        if len(calls) == 3:
            raise MemoryError
        return lambda x: x

    monkeypatch.setattr(weights, "_multiply", fail_at_the_third)
    with pytest.raises(MemoryError), ready_weights(model, passes=99):
        pass
    assert not any("forward" in vars(module) for module in model.modules())


def test_float32_without_autocast_is_left_alone():
    model = helpers.tiny_llama()
    with ready_weights(model, passes=99):
        assert not any("forward" in vars(module) for module in model.modules())


def test_bfloat16_weights_are_only_rearranged_and_only_where_that_can_be_done(monkeypatch):
    model = helpers.tiny_llama().to(torch.bfloat16)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        expected = model(ids).logits
        for packs in (True, False):
            monkeypatch.setattr(weights, "_can_pack", lambda packs=packs: packs)
            with ready_weights(model, passes=99):
                assert ("forward" in vars(model.lm_head)) is packs
                torch.testing.assert_close(model(ids).logits, expected, rtol=0.05, atol=0.01)


@pytest.mark.parametrize("kind", ["subclass", "own forward", "parametrised"])
def test_layers_that_compute_something_else_are_left_alone(kind):
    class Scaled(nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    layer = Scaled(8, 8) if kind == "subclass" else nn.Linear(8, 8)
    if kind == "own forward":
        layer.forward = lambda x: 3 * x
    if kind == "parametrised":
        nn.utils.parametrizations.weight_norm(layer)
    x = torch.randn(2, 8)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = layer(x)
        with ready_weights(layer, passes=99):
            assert torch.equal(layer(x), expected)
    assert ("forward" in vars(layer)) is (kind == "own forward")


def test_for_a_few_passes_nothing_is_rearranged():
    model = helpers.tiny_llama()
    with torch.autocast("cpu", torch.bfloat16):
        with ready_weights(model, passes=3):  # trainable: autocast remembers these casts
            assert not any("forward" in vars(module) for module in model.modules())
        with ready_weights(model.requires_grad_(False), passes=3):
            assert "forward" in vars(model.lm_head)
