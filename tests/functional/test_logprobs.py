from __future__ import annotations

import math

import pytest
import torch

from grpo_trainer.functional.logprobs import token_entropy, token_logprobs


def log_softmax_on_paper(logits: list[float], temperature: float) -> list[float]:
    """One vocabulary entry after the other, in float64, with the largest logit taken out first."""
    scaled = [x / temperature for x in logits]
    top = max(scaled)
    log_sum = math.log(math.fsum(math.exp(x - top) for x in scaled))
    return [x - top - log_sum for x in scaled]


@pytest.mark.parametrize(("temperature", "value"), [(0.5, -0.018150), (1.0, -0.126928), (2.0, -0.313262)])
def test_logits_are_divided_by_the_temperature(temperature, value):
    # logits 2 and 0, the first token: -log(1 + e^(-2 / temperature))
    logits = torch.tensor([[[2.0, 0.0]]])
    got = token_logprobs(logits, torch.zeros(1, 1, dtype=torch.long), temperature=temperature).item()
    assert got == pytest.approx(value, abs=5e-7)
    assert got == pytest.approx(-math.log1p(math.exp(-2 / temperature)), abs=5e-7)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_each_value_is_the_log_softmax_at_its_own_position_and_id(temperature):
    logits = torch.randn(2, 3, 7) * 4
    ids = torch.tensor([[0, 6, 3], [2, 2, 5]])
    got = token_logprobs(logits, ids, temperature=temperature)
    entropy = token_entropy(logits, temperature=temperature)
    assert got.shape == entropy.shape == (2, 3)
    for b in range(2):
        for t in range(3):
            logp = log_softmax_on_paper(logits[b, t].tolist(), temperature)
            assert got[b, t].item() == pytest.approx(logp[ids[b, t]], abs=2e-6)
            assert entropy[b, t].item() == pytest.approx(-sum(math.exp(x) * x for x in logp), abs=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_half_precision_logits_are_reduced_in_float32(dtype, autocast):
    logits = (torch.randn(1, 4, 50) * 5).to(dtype)
    ids = torch.tensor([[0, 10, 20, 49]])
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        got, entropy = token_logprobs(logits, ids, temperature=0.7), token_entropy(logits, temperature=0.7)
    assert got.dtype == entropy.dtype == torch.float32
    for t in range(4):
        # the half-precision logits are taken as they are; what follows loses no more than float32 does
        logp = log_softmax_on_paper(logits[0, t].tolist(), 0.7)
        assert got[0, t].item() == pytest.approx(logp[ids[0, t]], abs=1e-5)
        assert entropy[0, t].item() == pytest.approx(-sum(math.exp(x) * x for x in logp), abs=1e-5)


def test_float64_logits_stay_float64():
    logits = torch.randn(1, 1, 5, dtype=torch.float64)
    assert token_logprobs(logits, torch.zeros(1, 1, dtype=torch.long)).dtype == torch.float64
    assert token_entropy(logits).dtype == torch.float64


@pytest.mark.parametrize("size", [2, 8, 1000])
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_uniform_logits_have_entropy_log_v(size, temperature):
    # log 8 = 2.07944
    logits = torch.full((1, 2, size), 3.0)
    assert token_entropy(logits, temperature=temperature)[0].tolist() == pytest.approx([math.log(size)] * 2, rel=1e-6)
    ids = torch.tensor([[0, size - 1]])
    assert token_logprobs(logits, ids, temperature=temperature)[0].tolist() == pytest.approx([-math.log(size)] * 2)


def test_a_token_that_is_ruled_out_adds_nothing_to_the_entropy():
    # two equal tokens are left of three: log 2
    assert token_entropy(torch.tensor([[[0.0, -math.inf, 0.0]]])).item() == pytest.approx(math.log(2))
    assert token_entropy(torch.tensor([[[0.0, -math.inf, -math.inf]]])).item() == 0.0


def test_probabilities_of_all_ids_add_up_to_one():
    logits = torch.randn(1, 1, 9).expand(1, 9, 9)
    assert token_logprobs(logits, torch.arange(9)[None]).exp().sum().item() == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("offset", [-100.0, 100.0])
def test_a_common_offset_of_the_logits_does_not_matter(offset):
    # the logits of GPT-2 lie around -100; one float32 step is 7.6e-6 there
    logits = torch.randn(1, 1, 20).round(decimals=2) * 4
    ids = torch.zeros(1, 1, dtype=torch.long)
    assert token_logprobs(logits + offset, ids).item() == pytest.approx(token_logprobs(logits, ids).item(), abs=2e-5)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_gradient_is_one_hot_less_the_probabilities_over_the_temperature(temperature):
    logits = torch.tensor([[[1.0, -2.0, 0.5]]], dtype=torch.float64, requires_grad=True)
    value = token_logprobs(logits, torch.tensor([[2]]), temperature=temperature)
    got = torch.autograd.grad(value.sum(), logits)[0][0, 0].tolist()
    p = [math.exp(x) for x in log_softmax_on_paper(logits[0, 0].tolist(), temperature)]
    assert got == pytest.approx([-p[0] / temperature, -p[1] / temperature, (1 - p[2]) / temperature], rel=1e-9)


def test_no_columns_are_legal():
    assert token_logprobs(torch.zeros(2, 0, 5), torch.zeros(2, 0, dtype=torch.long)).shape == (2, 0)
    assert token_entropy(torch.zeros(2, 0, 5)).shape == (2, 0)


@pytest.mark.parametrize("shape", [(2, 4), (1, 3), (2, 3, 1)])
def test_one_logit_vector_per_id_is_asked_for(shape):
    with pytest.raises(ValueError, match=r"expected all of shape \(B, T\)"):
        token_logprobs(torch.zeros(2, 3, 5), torch.zeros(shape, dtype=torch.long))
