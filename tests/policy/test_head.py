from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_trainer.policy import head
from grpo_trainer.policy.head import Transform, head_logprobs

TRANSFORMS = {
    "none": Transform(),
    "temperature": Transform(temperature=0.6),
    "scale": Transform(scale=0.25, temperature=0.8),
    "softcap": Transform(softcap=1.5),
    "all": Transform(scale=2.0, softcap=1.5, temperature=0.7),
}


def case(rows=5, tokens=8, vocab=700, size=6, bias=True, dtype=torch.float64, seed=0):
    draw = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()

    places = torch.randint(0, rows, (tokens,), generator=draw).sort().values
    targets = torch.randint(0, vocab, (tokens,), generator=draw)
    return random(rows, size), random(vocab, size), random(vocab) if bias else None, places, targets


def plain(hidden, weight, bias, places, targets, transform):
    """All logits, then the log-softmax."""
    z = torch.nn.functional.linear(hidden, weight, bias) * transform.scale
    if transform.softcap is not None:
        z = transform.softcap * torch.tanh(z / transform.softcap)
    logp = (z / transform.temperature).log_softmax(dim=-1)[places]
    return logp[torch.arange(len(targets)), targets], -(logp.exp() * logp).sum(dim=-1)


def gradients(out, inputs):
    weight = torch.linspace(-1, 2, len(out), dtype=out.dtype)
    return torch.autograd.grad((out * weight).sum(), [x for x in inputs if x is not None and x.requires_grad])


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("block", [1, 1 << 20])  # three blocks of the vocabulary, or one
def test_it_is_the_log_softmax_of_all_logits(transform, bias, keep, block, monkeypatch):
    monkeypatch.setattr(head, "BLOCK", block)
    monkeypatch.setattr(head, "KEEP_BYTES", 1 << 30 if keep else 0)
    transform = TRANSFORMS[transform]
    inputs = case(bias=bias)
    expected, entropy = plain(*inputs, transform)
    got, found = head_logprobs(*inputs, transform=transform, with_entropy=True)
    assert torch.allclose(got, expected, rtol=1e-12)
    assert torch.allclose(found, entropy, rtol=1e-10)
    assert not found.requires_grad
    for ours, theirs in zip(gradients(got, inputs[:3]), gradients(expected, inputs[:3]), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("block", [1, 1 << 20])
def test_a_frozen_head_gives_the_same_gradient_and_keeps_no_logits(transform, block, monkeypatch):
    monkeypatch.setattr(head, "BLOCK", block)
    transform = TRANSFORMS[transform]
    hidden, weight, bias, places, targets = case()
    weight, bias = weight.detach(), bias.detach()
    (expected,) = gradients(plain(hidden, weight, bias, places, targets, transform)[0], [hidden])
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.shape) or x, lambda x: x):
        out = head_logprobs(hidden, weight, bias, places, targets, transform=transform)[0]
    assert (5, 700) not in saved
    monkeypatch.setattr(head, "_linear", lambda *a: pytest.fail("logits were computed again"))
    (got,) = gradients(out, [hidden])
    assert torch.allclose(got, expected, rtol=1e-9, atol=1e-12)


def test_logits_are_kept_up_to_a_bound_and_computed_again_beyond(monkeypatch):
    inputs = case(bias=False)  # 5 x 700 logits of 8 bytes
    calls = []
    linear = head._linear
    monkeypatch.setattr(head, "_linear", lambda *a: calls.append(1) or linear(*a))
    for bound, backward in ((5 * 700 * 8, 0), (5 * 700 * 8 - 1, 1)):
        monkeypatch.setattr(head, "KEEP_BYTES", bound)
        calls.clear()
        out = head_logprobs(*inputs)[0]
        assert len(calls) == 1
        out.sum().backward()
        assert len(calls) == 1 + backward


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(0, 9), st.integers(1, 600), st.integers(0, 99))
def test_whatever_the_sizes(rows, tokens, vocab, seed):
    inputs = case(rows, tokens, vocab, size=3, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "BLOCK", 1)
        got = head_logprobs(*inputs, transform=TRANSFORMS["all"], with_entropy=True)
    for ours, theirs in zip(got, plain(*inputs, TRANSFORMS["all"]), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-9)


def test_without_a_token_every_gradient_is_zero():
    hidden, weight, bias, _, _ = case()
    none = torch.zeros(0, dtype=torch.long)
    out, entropy = head_logprobs(hidden[:0], weight, bias, none, none, with_entropy=True)
    assert out.shape == entropy.shape == (0,)
    out.sum().backward()
    assert not weight.grad.any() and not bias.grad.any() and not hidden.grad.any()


def test_an_unlikely_token_has_a_finite_log_prob():
    """exp(-400) is no float32."""
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[400.0], [0.0]])
    got, entropy = head_logprobs(hidden, weight, None, torch.tensor([0, 0]), torch.tensor([0, 1]), with_entropy=True)
    assert got.tolist() == [0.0, -400.0]
    assert entropy.tolist() == [0.0, 0.0]


def test_uniform_logits_by_hand():
    hidden, weight = torch.ones(1, 2), torch.zeros(10, 2)
    got, entropy = head_logprobs(hidden, weight, None, torch.tensor([0]), torch.tensor([3]), with_entropy=True)
    assert got.item() == pytest.approx(-math.log(10)) and entropy.item() == pytest.approx(math.log(10))


@pytest.mark.parametrize("frozen", [True, False])
def test_a_gradient_changes_no_bit_of_the_values(frozen):
    hidden, weight, bias, places, targets = case(dtype=torch.float32)
    weight = weight.detach() if frozen else weight
    with_gradient = head_logprobs(hidden, weight, bias, places, targets, dtype=torch.bfloat16)[0]
    with torch.no_grad():
        without = head_logprobs(hidden, weight, bias, places, targets, dtype=torch.bfloat16)[0]
    assert torch.equal(with_gradient, without) and with_gradient.requires_grad and not without.requires_grad


def test_products_in_bfloat16_softmax_and_gradients_in_float32():
    hidden, weight, _, places, targets = case(rows=40, tokens=60, size=16, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = head_logprobs(hidden, weight, None, places, targets, dtype=torch.bfloat16)[0]
    assert got.dtype == torch.float32
    logits = (hidden.detach().bfloat16() @ weight.detach().bfloat16().t()).double()  # the same rounded logits
    exact = logits.log_softmax(-1)[places, targets]
    assert torch.allclose(got.double(), exact, atol=1e-5)
    ours = gradients(got, [hidden, weight])
    theirs = gradients(plain(hidden, weight, None, places, targets, Transform())[0], [hidden, weight])
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 0.01 * b.norm()
