from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_trainer.policy import attention
from grpo_trainer.policy.attention import make_plan, packed_attention, tiled_attention
from grpo_trainer.policy.packing import Segment
from tests import helpers

KINDS = {
    "plain": {},
    "scaled": {"scaling": 0.7},
    "window": {"window": 3},
    "window of one": {"window": 1},
    "softcap": {"softcap": 1.5},
    "sink": {"sink": True},
    "all": {"scaling": 0.7, "window": 4, "softcap": 1.5, "sink": True},
}


def groups_of(*sizes) -> list[Segment]:
    """Prompts, each followed by its completions: (tokens, tokens of each completion)."""
    return tree_of(*((prompt, tuple((tokens, ()) for tokens in completions)) for prompt, completions in sizes))


def tree_of(*branches, depth=0, parent=-1, into=None) -> list[Segment]:
    """Segments of (tokens, branches that continue them), those without a token left out."""
    into = [] if into is None else into
    for tokens, children in branches:
        here = len(into)
        if tokens:
            into.append(Segment(length(into), tokens, depth, parent))
            tree_of(*children, depth=depth + tokens, parent=here, into=into)
    return into


def length(segments) -> int:
    return segments[-1].end if segments else 0


def rows_of(segments) -> list[list[int]]:
    """For each segment the stream's places of a row that ends with it."""
    rows = []
    for start, tokens, _, parent in segments:
        rows.append([*(rows[parent] if parent >= 0 else ()), *range(start, start + tokens)])
    return rows


TREE = (
    (3, ((2, ((1, ()), (4, ((2, ()), (1, ()))))), (5, ()))),
    (1, ()),
    (6, ((1, ((1, ((1, ()), (2, ()))), (3, ()))),)),
)
"""Rows that part more than once."""


def row_by_row(q, k, v, groups, *, scaling=None, window=None, softcap=None, sink=None):
    """Causal attention of each row on its own, query by query; (1, L, H, E)."""
    heads, ratio = q.shape[1], q.shape[1] // k.shape[1]
    out = {}
    for row in rows_of(groups):
        for i, place in enumerate(row):
            seen = row[max(0, i + 1 - (window or i + 1)) : i + 1]
            each = []
            for h in range(heads):
                scores = k[0, h // ratio, seen] @ q[0, h, place] * (scaling or 1 / math.sqrt(q.shape[-1]))
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                weights = scores.exp()
                total = weights.sum() + (sink[h].exp() if sink is not None else 0.0)
                each.append(weights @ v[0, h // ratio, seen] / total)
            out[place] = torch.stack(each)  # the same for every row that shares the place
    return torch.stack([out[place] for place in range(q.shape[2])])[None]


def check(groups, kind, heads=4, kv_heads=2, size=3, value_size=3, seed=0):
    """Values and gradients, in float64."""
    draw = torch.Generator().manual_seed(seed)
    options = dict(kind)

    def random(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64).requires_grad_()

    n = length(groups)
    q, k, v = random(1, heads, n, size), random(1, kv_heads, n, size), random(1, kv_heads, n, value_size)
    inputs = [q, k, v]
    if options.pop("sink", False):
        options["sink"] = random(heads)
        inputs.append(options["sink"])
    expected = row_by_row(q, k, v, groups, **options)
    window = options.pop("window", None)
    got = tiled_attention(q, k, v, make_plan(groups, window=window), **options)
    assert torch.allclose(got, expected, rtol=1e-10, atol=1e-12)
    weight = torch.randn(got.shape, generator=draw, dtype=torch.float64)
    for ours, theirs in zip(
        torch.autograd.grad((got * weight).sum(), inputs), gradients(expected, weight, inputs), strict=True
    ):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-11)


def gradients(out, weight, inputs):
    return torch.autograd.grad((out * weight).sum(), inputs)


# --- the values -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", [64, 3])
@pytest.mark.parametrize("keep", [0, 1000])
def test_it_is_the_attention_of_each_row_on_its_own(kind, tile, keep, monkeypatch):
    monkeypatch.setattr(attention, "TILE", tile)
    monkeypatch.setattr(attention, "KEEP", keep)
    check(groups_of((4, (2, 0, 5, 1)), (1, (3,)), (7, ())), KINDS[kind])
    check(tree_of(*TREE), KINDS[kind])


TREES = st.recursive(
    st.tuples(st.integers(1, 6), st.just(())),
    lambda inner: st.tuples(st.integers(1, 6), st.lists(inner, max_size=3).map(tuple)),
    max_leaves=6,
)


@settings(max_examples=40, deadline=None)
@given(st.lists(TREES, min_size=1, max_size=3), st.sampled_from(sorted(KINDS)), st.integers(1, 8), st.integers(0, 40))
def test_whatever_the_tree_and_however_it_is_cut(trees, kind, tile, call):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "TILE", tile)
        patch.setattr(attention, "CALL", call)
        check(tree_of(*trees), KINDS[kind], heads=2, kv_heads=1, size=2)


@pytest.mark.parametrize(("heads", "kv_heads", "value_size"), [(4, 4, 3), (4, 1, 3), (6, 2, 5)])
def test_heads_that_share_keys_and_values_of_another_size(heads, kv_heads, value_size):
    check(groups_of((3, (2, 4))), {}, heads=heads, kv_heads=kv_heads, value_size=value_size)


def test_a_prompt_without_completions_is_plain_causal_attention():
    q, k, v = (torch.randn(1, 2, 150, 8) for _ in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    assert torch.allclose(tiled_attention(q, k, v, make_plan(groups_of((150, ())))), expected, atol=1e-5)


# --- the plan ---------------------------------------------------------------------------------------------------------


def test_no_more_scores_than_a_bound_on_what_tiles_hide():
    """One prompt and 8 completions: dense, (Q + G T)² scores; needed, about Q²/2 + G T (Q + T/2)."""
    groups = groups_of((150, [83] * 8))
    scores = make_plan(groups).pairs
    needed = 150 * 151 // 2 + 8 * 83 * 150 + 8 * 83 * 84 // 2
    assert needed < scores < 1.35 * needed
    assert scores < 0.3 * length(groups) ** 2


def test_a_window_leaves_keys_out_that_no_query_sees():
    tiles = make_plan(groups_of((500, (100,))), window=10).tiles
    assert all(sum(b - a for a, b in t.keys) <= attention.TILE + 9 for t in tiles)


@pytest.mark.parametrize("sizes", [[(70, [3] * 40)], [(1, [200, 1, 64, 65])]])
def test_every_query_is_in_one_tile_and_no_tile_is_too_large(sizes):
    groups = groups_of(*sizes)
    tiles = make_plan(groups).tiles
    assert [place for t in tiles for place in range(t.first, t.end)] == list(range(length(groups)))
    assert max(t.end - t.first for t in tiles) <= attention.TILE


def test_weights_are_kept_while_they_are_small(monkeypatch):
    """6 queries of 3 numbers and 2 heads; a prompt's 3 * 3 and a completion's 3 * 6 pairs, for both heads."""
    q, k, v = (torch.randn(1, 2, 6, 3).requires_grad_() for _ in range(3))
    monkeypatch.setattr(attention, "CALL", 0)
    plan = make_plan(groups_of((3, (3,))))
    assert plan.pairs == 27
    for keep, computed in ((27 * 2 / (6 * 3 * 2), 2), (27 * 2 / (6 * 3 * 2) - 0.01, 4)):
        calls = []
        compute = attention._Weights.__call__
        monkeypatch.setattr(attention, "KEEP", keep)
        with monkeypatch.context() as patch:
            patch.setattr(attention._Weights, "__call__", lambda *a, f=compute, c=calls: c.append(1) or f(*a))
            tiled_attention(q, k, v, plan).sum().backward()
        assert len(calls) == computed


# --- precision --------------------------------------------------------------------------------------------------------


def test_under_autocast_scores_and_softmax_are_float32():
    """The scores 40, 40 1/16 and 40 1/8 are one number in bfloat16, which has steps of 1/4 there."""
    q = torch.tensor([1.0, 2**-7]).expand(1, 1, 3, 2)
    k = torch.tensor([[40.0, 0.0], [40.0, 8.0], [40.0, 16.0]])[None, None]
    with torch.autocast("cpu", torch.bfloat16):
        out = tiled_attention(q, k, torch.eye(3)[None, None], make_plan(groups_of((2, (1,)))), scaling=1.0)
    assert out.dtype == torch.bfloat16
    weights = [math.exp(x) for x in (0, 1 / 16, 1 / 8)]
    assert out[0, 2, 0].tolist() == pytest.approx([w / sum(weights) for w in weights], abs=1.5e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precisions_are_close(dtype):
    groups = groups_of((20, (9, 30)), (5, (70,)))
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, length(groups), 16, generator=draw, dtype=torch.float64) for h in (4, 2, 2))
    plan = make_plan(groups)
    wide = [x.clone().requires_grad_() for x in (q, k, v)]
    low = [x.to(dtype).requires_grad_() for x in (q, k, v)]
    for inputs in (wide, low):
        tiled_attention(*inputs, plan).square().sum().backward()
    for a, b in zip(wide, low, strict=True):
        error = (a.grad - b.grad).norm() / a.grad.norm()
        assert error < {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]


# --- what the model sees ----------------------------------------------------------------------------------------------


def stream(groups):
    position = [segment.depth + i for segment in groups for i in range(segment.tokens)]
    return 4 + torch.arange(len(position))[None] % 200, torch.tensor(position)[None]


@pytest.mark.parametrize("before", ["sdpa", "eager"])
def test_the_implementation_is_given_back_even_when_the_pass_fails(before):
    model = helpers.tiny_llama(attn_implementation=before)
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    functions = [m._gradient_checkpointing_func for m in model.modules() if hasattr(m, "_gradient_checkpointing_func")]
    with pytest.raises(ZeroDivisionError), packed_attention(model, groups_of((2, (1,)))):
        assert model.config._attn_implementation == attention.NAME
        raise ZeroDivisionError
    assert model.config._attn_implementation == before
    after = [m._gradient_checkpointing_func for m in model.modules() if hasattr(m, "_gradient_checkpointing_func")]
    assert len(functions) > 0 and all(a is b for a, b in zip(functions, after, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_checkpointing_computes_again_is_packed_too(reentrant):
    groups = groups_of((5, (3, 4, 2)))
    ids, positions = stream(groups)
    model = helpers.tiny_llama().train()

    def gradient():
        model.zero_grad()
        with packed_attention(model, groups):
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=positions).logits
        assert model.config._attn_implementation == "sdpa"
        logits.square().sum().backward()
        assert model.config._attn_implementation == "sdpa"
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    plain = gradient()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    assert torch.equal(gradient(), plain)


def test_no_mask_over_all_pairs_is_built():
    """The largest tensor of a pass grows with the stream, not with its square."""
    groups = groups_of((40, [30] * 16))
    ids, positions = stream(groups)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            largest = max(
                largest, *(x.numel() for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, torch.Tensor)), 0
            )
            return out

    model = helpers.tiny_llama(max_position_embeddings=1024)
    with torch.no_grad(), Watch(), packed_attention(model, groups):
        model(input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=positions, logits_to_keep=1)
    assert largest <= attention.TILE * 4 * (40 + attention.TILE + 30)  # the scores of 4 heads in a tile
    assert length(groups) ** 2 > 2 * largest


def test_a_layer_that_asks_for_what_there_is_not_is_refused():
    with pytest.raises(RuntimeError, match="position bias: True"):
        attention._layer_attention(
            torch.nn.Linear(1, 1),
            *[torch.zeros(1, 1, 1, 1)] * 3,
            make_plan(groups_of((1, ()))),
            position_bias=torch.zeros(1),
        )
    with pytest.raises(RuntimeError, match="mask: Tensor"):
        attention._layer_attention(torch.nn.Linear(1, 1), *[torch.zeros(1, 1, 1, 1)] * 3, torch.zeros(1))
