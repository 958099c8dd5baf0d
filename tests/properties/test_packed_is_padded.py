"""Packed rows have the log-probs, entropies and gradients of padded ones: any architecture, any arrangement of rows."""

from __future__ import annotations

import copy

import peft
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from grpo_trainer.policy import scoring
from grpo_trainer.policy.scoring import completion_logprobs
from tests import helpers
from tests.policy.families import FAMILIES, random_batch, tiny

RELATIVE = 2e-5
"""Of the norm; float32 rounds to 6e-8 and a pass adds up a few thousand numbers."""


def padded(model, batch, **kwargs):
    return scoring._padded_pass(model, batch, kwargs.get("temperature", 1.0), kwargs.get("with_entropy", False))


def row_by_row(model, batch, **kwargs):
    """Each row alone, so that neither padding nor company plays a part."""
    width = batch.completion_ids.shape[1]
    rows = [padded(model, batch.select([i]), **kwargs) for i in range(len(batch))]

    def stack(values):
        return torch.stack([nn.functional.pad(v[0], (0, width - v.shape[1])) for v in values])

    return scoring.Scores(stack([r.logprobs for r in rows]), stack([r.entropy for r in rows]))


def measure(model, batch, how=completion_logprobs, temperature=0.7):
    """Log-probs, entropies, and the gradient of a sum in which every token counts differently."""
    model.zero_grad()
    scores = how(model, batch, temperature=temperature, with_entropy=True)
    weights = torch.linspace(-1, 2, scores.logprobs.numel()).view_as(scores.logprobs)
    (scores.logprobs * weights * batch.mask).sum().backward()
    gradient = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return scores.logprobs.detach(), scores.entropy, gradient


def assert_equal(got, expected, relative=RELATIVE):
    for a, b in zip(got[:2], expected[:2], strict=True):
        assert (a - b).norm() <= relative * b.norm()
    assert got[2].keys() == expected[2].keys() and got[2]
    total = torch.cat([g.flatten() for g in expected[2].values()]).norm()
    assert total > 0
    for name, theirs in expected[2].items():  # tensor by tensor; one that is nearly zero, as a share of the whole
        error = (got[2][name] - theirs).norm()
        assert error <= max(relative * theirs.norm(), 1e-6 * total), f"{name}: {error / theirs.norm():.1e}"


# --- every architecture -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_every_architecture_row_by_row(family):
    model, batch = tiny(family), random_batch()
    assert scoring.why_padded(model) is None
    assert_equal(measure(model, batch), measure(model, batch, row_by_row))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_of_the_model_itself_gives_the_same(family, monkeypatch):
    model, batch = tiny(family), random_batch()
    expected = measure(model, batch)
    monkeypatch.setattr(scoring, "plain_head", lambda model: None)
    assert_equal(measure(model, batch), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_of_the_entropy_is_that_of_padded_rows(family):
    """The head that scores in one pass gives none, so the bonus takes the logits of the packed pass."""
    model, batch = tiny(family), random_batch()

    def slopes(how):
        model.zero_grad()
        scores = how(model, batch, 0.7, True, True)
        assert scores.entropy.requires_grad
        weights = torch.linspace(-1, 2, scores.entropy.numel()).view_as(scores.entropy)
        ((scores.entropy + 0.5 * scores.logprobs) * weights * batch.mask).sum().backward()
        gradient = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        return scores.logprobs.detach(), scores.entropy.detach(), gradient

    assert_equal(slopes(scoring._packed_pass), slopes(scoring._padded_pass))


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing_gives_the_same_bits(family):
    model, batch = tiny(family).train(), random_batch()
    plain = measure(model, batch)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for a, b in zip(measure(model, batch)[2].values(), plain[2].values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("family", FAMILIES)
def test_under_autocast_they_are_as_close_as_rounding_lets_them(family):
    """What packing changes is at most twice what bfloat16 changes."""
    model, batch = tiny(family), random_batch()
    exact = measure(model, batch, padded)
    with torch.autocast("cpu", torch.bfloat16):
        rounded, packed = measure(model, batch, padded), measure(model, batch)
    assert packed[0].dtype == torch.float32
    for get in (lambda m: m[0], lambda m: torch.cat([g.flatten() for g in m[2].values()])):
        noise = (get(rounded) - get(exact)).norm()
        assert 0 < (get(packed) - get(exact)).norm() <= 2 * noise


# --- any arrangement --------------------------------------------------------------------------------------------------

COMMON = {"llama": tiny("llama"), "gpt2": tiny("gpt2"), "gemma2": tiny("gemma2")}


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(sorted(COMMON)),
    st.lists(st.integers(1, 16), min_size=1, max_size=4),
    st.integers(0, 999),
    st.data(),
)
def test_any_groups_any_order_any_split(family, sizes, seed, data):
    model = COMMON[family]
    prompts = data.draw(st.lists(st.integers(1, 12), min_size=len(sizes), max_size=len(sizes)))
    batch = random_batch(prompts, sizes, seed=seed)
    if not sum(batch.lengths):
        return
    order = data.draw(st.permutations(range(len(batch))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(batch)), max_size=3)))
    parts = [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(batch)], strict=True) if a < b]
    width = batch.completion_ids.shape[1]

    def in_parts(model, batch, **kwargs):
        logprobs, entropy = torch.zeros(len(batch), width), torch.zeros(len(batch), width)
        for part in parts:
            scores = completion_logprobs(model, batch.select(part), **kwargs)
            columns = torch.arange(scores.logprobs.shape[1])
            place = (torch.tensor(part)[:, None], columns)
            logprobs = logprobs.index_put(place, scores.logprobs)
            entropy = entropy.index_put(place, scores.entropy)
        return scoring.Scores(logprobs, entropy)

    assert_equal(measure(model, batch, in_parts), measure(model, batch, padded), relative=5e-5)


@pytest.mark.parametrize("build", [helpers.tiny_gpt2, helpers.tiny_llama])
def test_a_row_that_fills_the_context(build):
    size = {"n_positions": 16} if build is helpers.tiny_gpt2 else {"max_position_embeddings": 16}
    model, batch = build(**size), random_batch((10, 15), (3, 2), lengths=(6, 2, 5, 1, 1))
    assert_equal(measure(model, batch), measure(model, batch, padded))


def test_positions_that_change_with_the_longest_row():
    """Beyond 8 tokens the rotary table of all rows is another one; the longest row has 9, its last token included."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    batch = random_batch((5,), (2,), lengths=(4, 2))
    model, plain = (tiny("llama", max_position_embeddings=8, **more) for more in ({"rope_parameters": rope}, {}))
    got = measure(model, batch)
    assert_equal(got, measure(model, batch, padded))
    assert (got[0] - measure(plain, batch)[0]).norm() > 1e-4 * got[0].norm()


def test_a_prompt_longer_than_a_tile_and_completions_of_every_length():
    model = tiny("llama", max_position_embeddings=512)
    batch = random_batch((150,), (6,), longest=140, seed=1)
    assert_equal(measure(model, batch), measure(model, batch, padded))


# --- what is trained --------------------------------------------------------------------------------------------------


def trained_part(model, names):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in names))
    return model


@pytest.mark.parametrize("names", [["layers.1"], ["lm_head"], ["embed_tokens"], ["q_proj", "norm"]])
def test_frozen_layers(names):
    model, batch = trained_part(tiny("llama"), names), random_batch()
    got, expected = measure(model, batch), measure(model, batch, padded)
    assert all(any(part in name for part in names) for name in got[2])
    assert_equal(got, expected)


def test_tied_embeddings():
    model, batch = tiny("llama", tie_word_embeddings=True), random_batch()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_equal(measure(model, batch), measure(model, batch, padded))


def test_a_head_with_a_bias():
    model, batch = tiny("llama"), random_batch()
    model.set_output_embeddings(nn.Linear(32, 96))
    got = measure(model, batch)
    assert got[2]["lm_head.bias"].norm() > 0
    assert_equal(got, measure(model, batch, padded))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], "all-linear"])
def test_lora(targets, checkpointing):
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=targets, r=4, init_lora_weights=False, task_type="CAUSAL_LM")
    model, batch = peft.get_peft_model(tiny("qwen2"), config).train(), random_batch()
    if checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    got = measure(model, batch)
    assert all("lora_" in name for name in got[2])
    assert_equal(got, measure(model, batch, padded))


def test_a_frozen_head_costs_no_product_in_the_backward_pass():
    """Of the gradient of its weight there is no trace: nothing of its size is made."""
    config = peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False)
    model, batch = peft.get_peft_model(tiny("llama", vocab_size=1000), config), random_batch()
    logprobs = completion_logprobs(model, batch).logprobs
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, torch.Tensor))
            return out

    with Watch():
        logprobs.sum().backward()
    assert max(sizes) < 1000 * 32


def test_float16_with_a_loss_scale():
    model, batch = tiny("llama"), random_batch()
    exact = measure(model, batch, padded)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model.zero_grad()
    with torch.autocast("cpu", torch.float16):
        logprobs = completion_logprobs(model, batch, temperature=0.7).logprobs
    weights = torch.linspace(-1, 2, logprobs.numel()).view_as(logprobs)
    scaler.scale((logprobs * weights * batch.mask).sum()).backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()]) / 1024
    expected = torch.cat([g.flatten() for g in exact[2].values()])
    assert (gradient - expected).norm() < 0.02 * expected.norm()


def test_a_copy_of_the_model_has_the_same_bits():
    """What the reference is before the first update: KL is then exactly 0."""
    model, batch = tiny("gemma2"), random_batch()
    policy = completion_logprobs(model.train(), batch, with_entropy=True).logprobs
    reference = copy.deepcopy(model).eval().requires_grad_(False)
    with torch.no_grad():
        assert torch.equal(completion_logprobs(reference, batch).logprobs, policy)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_layers_under_an_adapter(bits):
    import bitsandbytes as bnb

    model, batch = tiny("llama", hidden_size=64, intermediate_size=128), random_batch()
    for layer in model.model.layers:
        for block in (layer.self_attn, layer.mlp):
            for name, child in list(block.named_children()):
                if isinstance(child, nn.Linear):
                    size = (child.in_features, child.out_features)
                    if bits == 4:
                        new = bnb.nn.Linear4bit(*size, bias=False, quant_type="nf4", compute_dtype=torch.float32)
                        new.weight = bnb.nn.Params4bit(child.weight.data, requires_grad=False, quant_type="nf4")
                    else:
                        new = bnb.nn.Linear8bitLt(*size, bias=False, has_fp16_weights=False)
                        new.weight = bnb.nn.Int8Params(child.weight.data, requires_grad=False)
                    setattr(block, name, new.to("cpu"))
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False)
    model = peft.get_peft_model(model, config)
    got, expected = measure(model, batch), measure(model, batch, padded)
    # in 8 bits the inputs are rounded too, to a scale of their own row
    assert (got[0] - expected[0]).norm() < (1e-4 if bits == 4 else 2e-2) * expected[0].norm()
