from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from grpo_trainer.loading.head import cast_head_to_float32
from grpo_trainer.policy import scoring
from grpo_trainer.policy.scoring import check_packing, completion_logprobs
from grpo_trainer.types import RolloutBatch
from tests import helpers

MODELS = {"llama": helpers.tiny_llama, "gpt2": helpers.tiny_gpt2}  # rotary and absolute positions
PROMPTS = [(5, 6, 7), (8, 9, 10, 11, 12, 13, 14, 15, 16), (17,)]
ROWS = [(0, (20, 21)), (0, (22, 23, 24, 25, 1)), (1, (26,)), (1, ()), (2, (27, 28, 29, 30)), (2, (1,))]


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]()


@pytest.fixture(params=["packed", "padded"])
def layout(request, monkeypatch):
    """Either of the two ways, whatever the model could take."""
    if request.param == "padded":
        monkeypatch.setattr(scoring, "why_padded", lambda model: "the test says so")
    return request.param


def batch_of(rows=ROWS) -> RolloutBatch:
    """Rows of (index into PROMPTS, completion)."""
    lengths = tuple(len(c) for _, c in rows)
    width = max(lengths)
    return RolloutBatch(
        prompt_ids=tuple(torch.tensor(p) for p in PROMPTS),
        prompt_of_row=tuple(p for p, _ in rows),
        lengths=lengths,
        completion_ids=torch.tensor([[*c, *[0] * (width - len(c))] for _, c in rows], dtype=torch.long),
        mask=torch.arange(width) < torch.tensor(lengths)[:, None],
        advantages=torch.zeros(len(rows)),
    )


def by_hand(model, prompt, completion, temperature=1.0) -> list[tuple[float, float]]:
    """Log-prob and entropy of each token: the plain forward of one unpadded sequence, and float64 after that."""
    if not completion:
        return []
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *completion]])).logits[0]
    out = []
    for t, token in enumerate(completion):
        scaled = [x / temperature for x in logits[len(prompt) + t - 1].tolist()]  # predicts the token that follows
        top = max(scaled)
        log_sum = top + math.log(math.fsum(math.exp(x - top) for x in scaled))
        out.append((scaled[token] - log_sum, -math.fsum(math.exp(x - log_sum) * (x - log_sum) for x in scaled)))
    return out


class Plain(nn.Module):
    """A model of someone else's making: it keeps every logit, whatever is asked of it."""

    def __init__(self, inner) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids, attention_mask, position_ids):
        return SimpleNamespace(
            logits=self.inner(input_ids, attention_mask=attention_mask, position_ids=position_ids).logits
        )


class IgnoresKeep(Plain):
    def forward(self, input_ids, attention_mask, position_ids, logits_to_keep=0):
        return super().forward(input_ids, attention_mask, position_ids)


class Wrapper(nn.Module):
    """As data-parallel wrappers are: the arguments are hidden, the model is ``module``."""

    def __init__(self, module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


# --- the values -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_row_in_a_batch_is_the_row_alone_and_the_plain_forward(model, temperature, layout):
    scores = completion_logprobs(model, batch_of(), temperature=temperature, with_entropy=True)
    assert scores.logprobs.shape == scores.entropy.shape == (6, 5)
    for i, (p, completion) in enumerate(ROWS):
        n = len(completion)
        expected = by_hand(model, PROMPTS[p], completion, temperature)
        assert scores.logprobs[i, :n].tolist() == pytest.approx([x for x, _ in expected], abs=1e-5)
        assert scores.entropy[i, :n].tolist() == pytest.approx([x for _, x in expected], abs=1e-5)
        # the rest is no token of the row
        assert scores.logprobs[i, n:].tolist() == scores.entropy[i, n:].tolist() == [0.0] * (5 - n)
        alone = completion_logprobs(model, batch_of([ROWS[i]]), temperature=temperature, with_entropy=True)
        assert torch.allclose(alone.logprobs[0], scores.logprobs[i, :n], atol=1e-5)
        assert torch.allclose(alone.entropy[0], scores.entropy[i, :n], atol=1e-5)


@pytest.mark.parametrize("wrap", [Plain, IgnoresKeep, Wrapper, lambda m: Wrapper(Wrapper(m))], ids=range(4))
def test_neither_a_model_without_logits_to_keep_nor_a_wrapper_changes_a_value(model, wrap):
    expected = completion_logprobs(model, batch_of()).logprobs
    assert torch.allclose(completion_logprobs(wrap(model), batch_of()).logprobs, expected, atol=1e-5)


def test_a_compiled_model_has_the_same_values(model):
    expected = completion_logprobs(model, batch_of()).logprobs
    with torch.compiler.set_stance("force_eager"):  # the wrapper is what is tested, not the compiler
        got = completion_logprobs(torch.compile(model), batch_of()).logprobs
    assert torch.allclose(got, expected, atol=1e-5)


def test_an_adapter_that_is_still_zero_has_the_values_of_its_base(model, layout):
    import peft

    expected = completion_logprobs(model, batch_of()).logprobs
    layers = ["c_attn"] if model.config.model_type == "gpt2" else ["q_proj"]
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=layers, fan_in_fan_out=layers == ["c_attn"]))
    for wrapped in (adapted, Wrapper(adapted)):
        assert torch.allclose(completion_logprobs(wrapped, batch_of()).logprobs, expected, atol=1e-5)


def test_a_model_that_takes_no_position_ids_is_scored_without_them():
    model = helpers.tiny_llama()

    class Rotary(nn.Module):
        def forward(self, input_ids, attention_mask):
            return model(input_ids, attention_mask=attention_mask)

    # rotary attention sees distances only, so the padding in front makes no difference
    expected = completion_logprobs(model, batch_of()).logprobs
    assert torch.allclose(completion_logprobs(Rotary(), batch_of()).logprobs, expected, atol=1e-5)


def test_a_model_that_takes_any_argument_is_given_the_positions(model):
    class Anything(nn.Module):
        def forward(self, input_ids, **kwargs):
            return model(input_ids, **kwargs)

    expected = completion_logprobs(model, batch_of()).logprobs
    assert torch.allclose(completion_logprobs(Anything(), batch_of()).logprobs, expected, atol=1e-5)


def test_a_token_depends_on_those_before_it_alone(model, layout):
    before = completion_logprobs(model, batch_of([(0, (20, 21, 22, 23))])).logprobs[0]
    after = completion_logprobs(model, batch_of([(0, (20, 21, 99, 23))])).logprobs[0]
    assert torch.equal(before[:2], after[:2])
    assert (before[2:] != after[2:]).all()
    other = completion_logprobs(model, batch_of([(1, (20, 21, 22, 23))])).logprobs[0]
    assert (before != other).all()  # the prompt matters from the first token on


def test_uniform_predictions_have_entropy_log_v_whatever_the_padding(layout):
    model = helpers.tiny_llama(vocab_size=40)
    nn.init.zeros_(model.lm_head.weight)
    scores = completion_logprobs(model, batch_of(), with_entropy=True, temperature=0.5)
    real = batch_of().mask
    assert scores.entropy[real].tolist() == pytest.approx([math.log(40)] * int(real.sum()), rel=1e-6)
    assert scores.logprobs[real].tolist() == pytest.approx([-math.log(40)] * int(real.sum()), rel=1e-6)
    assert not scores.entropy[~real].any()


def test_credit_does_not_decide_what_is_scored(model, layout):
    import dataclasses

    batch = batch_of()
    uncredited = dataclasses.replace(batch, mask=torch.zeros_like(batch.mask))
    assert torch.equal(completion_logprobs(model, uncredited).logprobs, completion_logprobs(model, batch).logprobs)


# --- precision --------------------------------------------------------------------------------------------------------


def test_under_autocast_the_log_softmax_of_padded_rows_is_float32(model, monkeypatch):
    monkeypatch.setattr(scoring, "why_padded", lambda model: "the test says so")
    seen = []
    model.register_forward_hook(lambda module, args, out: seen.append(out.logits.detach()))
    with torch.autocast("cpu", torch.bfloat16):
        scores = completion_logprobs(model, batch_of(), temperature=0.7, with_entropy=True)
    assert seen[0].dtype == torch.bfloat16
    assert scores.logprobs.dtype == scores.entropy.dtype == torch.float32
    # the model's own bf16 logits, carried on in float64: had the log-softmax been bf16, the third digit would differ
    logp = (seen[0].double() / 0.7).log_softmax(-1)
    for i, (_, completion) in enumerate(ROWS):
        expected = [logp[i, -6 + t, token].item() for t, token in enumerate(completion)]
        assert scores.logprobs[i, : len(completion)].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("weights", "autocast", "expected"),
    [
        ("float32", False, "float32"),
        ("float32", True, "bfloat16"),
        ("bfloat16", False, "bfloat16"),
        ("head in float32", True, "float32"),
        ("head in float32", False, "float32"),
    ],
)
def test_the_product_of_the_head_has_the_precision_that_the_model_would_give_it(
    weights, autocast, expected, monkeypatch
):
    model = helpers.tiny_llama().to(torch.float32 if weights == "float32" else torch.bfloat16)
    if weights == "head in float32":
        cast_head_to_float32(model)
    seen, score = [], scoring.head_logprobs
    monkeypatch.setattr(scoring, "head_logprobs", lambda *a, **k: seen.append(k["dtype"]) or score(*a, **k))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logprobs = completion_logprobs(model, batch_of()).logprobs
    assert seen == [getattr(torch, expected)]
    assert logprobs.dtype == torch.float32


# --- gradients, state, edges ------------------------------------------------------------------------------------------


def gradient(model, *batches) -> torch.Tensor:
    model.zero_grad()
    for batch in batches:
        completion_logprobs(model, batch).logprobs.sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_the_gradient_of_a_batch_is_that_of_its_rows(model, layout):
    whole = gradient(model, batch_of())
    assert whole.isfinite().all() and whole.norm() > 0
    apart = gradient(model, *[batch_of([row]) for row in ROWS if row[1]])
    assert torch.allclose(whole, apart, rtol=1e-4, atol=1e-5)


def test_gradient_checkpointing_changes_no_gradient(model, layout):
    plain = gradient(model, batch_of())
    model.train()  # checkpointing is on in training mode only; the tiny models have no dropout
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert torch.allclose(gradient(model, batch_of()), plain, rtol=1e-5, atol=1e-6)


def test_entropy_is_given_on_request_and_without_gradient(model, layout):
    assert completion_logprobs(model, batch_of()).entropy is None
    scores = completion_logprobs(model, batch_of(), with_entropy=True)
    assert scores.logprobs.requires_grad and not scores.entropy.requires_grad
    with torch.no_grad():
        assert not completion_logprobs(model, batch_of()).logprobs.requires_grad


def test_the_entropy_has_the_gradient_of_the_plain_forward_on_request(model, layout):
    row = ROWS[0]
    prompt, completion = PROMPTS[row[0]], row[1]
    logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1] / 0.7
    logp = logits.log_softmax(dim=-1)
    plain = torch.autograd.grad(-(logp.exp() * logp).sum(), list(model.parameters()), allow_unused=True)
    scores = completion_logprobs(model, batch_of([row]), temperature=0.7, with_entropy=True, entropy_gradient=True)
    found = torch.autograd.grad(scores.entropy.sum(), list(model.parameters()), allow_unused=True)
    for a, b in zip(plain, found, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, rtol=1e-4, atol=1e-6)


def test_a_batch_of_empty_completions_is_a_zero_that_reaches_every_weight(model, layout):
    scores = completion_logprobs(model, batch_of([(0, ()), (1, ())]), with_entropy=True)
    assert scores.logprobs.shape == scores.entropy.shape == (2, 0)
    scores.logprobs.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_padded_only_the_logits_of_the_completion_are_asked_for_and_no_cache(model, monkeypatch):
    monkeypatch.setattr(scoring, "why_padded", lambda model: "the test says so")
    seen = {}
    model.register_forward_pre_hook(lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True)
    completion_logprobs(model, batch_of())
    assert seen["logits_to_keep"] == 5 + 1  # the longest completion, and the position before it
    assert seen["use_cache"] is False
    # prompts end, and positions start at 0, in the same column for every row: prompts are padded on the left
    assert seen["attention_mask"][4].tolist() == [0] * 8 + [1] + [1] * 4 + [0]
    assert seen["position_ids"][4, 8:13].tolist() == [0, 1, 2, 3, 4]
    assert seen["input_ids"][4, 8:13].tolist() == [17, 27, 28, 29, 30]


def test_packed_every_prompt_is_computed_once_and_the_head_sees_no_more_than_it_must(model):
    seen, products = {}, []
    model.register_forward_pre_hook(lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True)
    model.lm_head.register_forward_pre_hook(lambda module, args: products.append(args[0].shape))
    completion_logprobs(model, batch_of())
    # rows 0 and 1 of prompt 0, 2 of prompt 1 (row 3 is empty), 4 and 5 of prompt 2, each without its last token
    assert seen["input_ids"].tolist() == [[5, 6, 7, 20, 22, 23, 24, 25, *range(8, 17), 17, 27, 28, 29]]
    assert seen["position_ids"][0, :8].tolist() == [0, 1, 2, 3, 3, 4, 5, 6]
    assert seen["use_cache"] is False
    # 13 tokens are scored; the ends of prompts 0 and 2 predict two of them each
    assert products[-1] == (1, 13 - 2, 64)  # before, a single token to ask the model what it does with its logits


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_of_the_model_is_left_to_the_caller(model, training, layout):
    model.train(training)
    completion_logprobs(model, batch_of())
    assert all(module.training is training for module in model.modules())


def test_equal_weights_give_equal_bits_with_and_without_a_gradient(model, layout):
    """Old and reference passes run without a gradient and without entropies, and the ratio has to be exactly 1."""
    for precision in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
            with torch.no_grad():
                old = completion_logprobs(model, batch_of(), temperature=0.7).logprobs
            model.train()
            new = completion_logprobs(model, batch_of(), temperature=0.7, with_entropy=True).logprobs
            model.eval()
        assert torch.equal(old, new) and new.requires_grad


# --- words and checks -------------------------------------------------------------------------------------------------


@pytest.fixture
def said(monkeypatch):
    words = []
    monkeypatch.setattr(scoring, "_said", set())
    monkeypatch.setattr(scoring.logger, "warning", words.append)
    return words


def test_why_rows_are_padded_is_said_once(said):
    model = helpers.tiny_llama()
    completion_logprobs(model, batch_of())
    assert said == []
    for _ in range(2):
        completion_logprobs(Plain(model), batch_of())
    assert len(said) == 1
    assert said[0].startswith("Plain computes each prompt once per completion, padded, because Plain is not a model of")


def test_the_check_passes_on_a_sound_model_and_changes_nothing(model):
    model.train()
    check_packing(model, batch_of(), temperature=0.6)
    check_packing(model, batch_of([(0, ()), (1, ())]))
    check_packing(model.bfloat16(), batch_of())
    assert model.training and model.config._attn_implementation == "sdpa"
    assert all(p.grad is None for p in model.parameters())


def test_the_check_finds_a_token_that_sees_too_much(model, monkeypatch):
    from grpo_trainer.policy import attention

    plan = attention.make_plan

    def leaky(groups, **kwargs):
        tiles = [tile._replace(mask=torch.zeros_like(tile.mask)) for tile in plan(groups, **kwargs).tiles]
        return attention.Plan(tuple(tiles))

    monkeypatch.setattr(attention, "make_plan", leaky)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match=r"differ by .* nats .*never_pack"):
        check_packing(model, batch_of())


def test_the_check_has_nothing_to_say_about_a_model_that_is_padded():
    check_packing(Plain(helpers.tiny_llama()), batch_of())
