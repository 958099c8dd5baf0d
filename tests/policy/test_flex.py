"""The mask that FlexAttention is given is the tree of rows; on a GPU also the kernel, values and gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_trainer.policy import flex
from grpo_trainer.policy.packing import Segment, pack
from grpo_trainer.policy.scoring import completion_logprobs
from tests.policy.families import FAMILIES, random_batch, tiny
from tests.policy.test_attention import KINDS, TREE, TREES, groups_of, length, row_by_row, rows_of, tree_of

gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that CUDA can use")


def whole_blocks(segments):
    missing = -length(segments) % flex.BLOCK
    return [*segments, Segment(length(segments), missing, 0, -1)] if missing else segments


def seen_by_rows(segments, window):
    """Who sees whom, from the rows themselves."""
    n = length(segments)
    seen = torch.zeros(n, n, dtype=torch.bool)
    for row in rows_of(segments):
        for i, place in enumerate(row):
            seen[place, row[max(0, i + 1 - (window or i + 1)) : i + 1]] = True
    return seen


def seen_by_mask(plan, n):
    """What the blocks and the function of the mask let through."""
    places = torch.arange(n)
    inside = plan.mask.mask_mod(0, 0, places[:, None], places[None])
    out = torch.zeros(n, n, dtype=torch.bool)
    m = plan.mask
    for counts, indices, whole in (
        (m.kv_num_blocks, m.kv_indices, False),
        (m.full_kv_num_blocks, m.full_kv_indices, True),
    ):
        for i in range(n // flex.BLOCK):
            for j in indices[0, 0, i, : counts[0, 0, i]].tolist():
                a, b = (slice(x * flex.BLOCK, (x + 1) * flex.BLOCK) for x in (i, j))
                out[a, b] = True if whole else inside[a, b]
    return out


@settings(max_examples=30, deadline=None)
@given(st.lists(TREES, min_size=1, max_size=3), st.sampled_from([None, 1, 3]), st.sampled_from([2, 4, 8]))
def test_the_mask_is_the_tree_of_rows(trees, window, block):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "BLOCK", block)
        segments = whole_blocks(tree_of(*trees))
        plan = flex.flex_plan(segments, window=window)
        assert torch.equal(seen_by_mask(plan, length(segments)), seen_by_rows(segments, window))


def test_blocks_that_nobody_sees_are_not_computed_and_full_ones_not_masked():
    # a prompt of three blocks and two completions of two: each completion sees the prompt and itself
    segments = groups_of((3 * 128, (2 * 128, 2 * 128)))
    plan = flex.flex_plan(segments)
    full = [[[1, 2, 3][:i] for i in range(3)]]
    assert plan.mask.full_kv_num_blocks[0, 0].tolist() == [len(f) for f in full[0]] + [3, 4, 3, 4]
    assert plan.mask.kv_num_blocks[0, 0].tolist() == [1] * 7  # the diagonal
    with pytest.raises(ValueError, match="a stream of 130 tokens is not a multiple of 128"):
        flex.flex_plan(groups_of((130, ())))


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_attention_of_each_row_on_its_own(kind):
    options = dict(KINDS[kind])
    draw = torch.Generator().manual_seed(0)
    for segments in (groups_of((4, (2, 0, 5, 1)), (1, (3,)), (7, ())), tree_of(*TREE)):
        filled = whole_blocks(segments)
        n = length(filled)
        q, k, v = (torch.randn(1, heads, n, 16, generator=draw) for heads in (4, 2, 2))
        sink = torch.randn(4, generator=draw) if options.get("sink") else None
        knobs = {name: value for name, value in options.items() if name in ("scaling", "softcap")}
        window = options.get("window")
        with torch.no_grad():
            got = flex.attend(q, k, v, flex.flex_plan(filled, window=window), sink=sink, **knobs)
        real = length(segments)
        cut = [x[:, :, :real] for x in (q, k, v)]
        expected = row_by_row(*cut, segments, window=window, sink=sink, **knobs)
        assert torch.allclose(got[:, :real], expected, atol=2e-5)


def test_a_stream_is_filled_up_with_a_row_that_nobody_reads():
    batch = random_batch()
    plain, filled = pack(batch), pack(batch, multiple=128)
    n = plain.input_ids.shape[1]
    assert filled.input_ids.shape[1] == 128 * -(-n // 128) and torch.equal(filled.input_ids[:, :n], plain.input_ids)
    assert filled.segments[:-1] == plain.segments and filled.segments[-1].parent == -1
    for name in ("predictors", "places", "targets", "cells"):
        assert torch.equal(getattr(filled, name), getattr(plain, name))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_architecture_scores_the_same_on_the_stream_of_a_gpu(family, monkeypatch):
    """The forward pass as on a GPU, on this machine; FlexAttention has no backward pass on a CPU."""
    from grpo_trainer.policy import attention, scoring

    model, batch = tiny(family), random_batch()
    with torch.no_grad():
        expected = completion_logprobs(model, batch).logprobs
        monkeypatch.setattr(attention, "make_plan", flex.flex_plan)
        monkeypatch.setattr(
            scoring, "pack", lambda batch, *, keep_last, multiple: pack(batch, keep_last=keep_last, multiple=128)
        )
        calls = []
        inner = attention.attend
        monkeypatch.setattr(attention, "attend", lambda *args, **options: (calls.append(1), inner(*args, **options))[1])
        got = completion_logprobs(model, batch).logprobs
    assert torch.allclose(got, expected, atol=2e-5)
    assert len(calls) == model.config.num_hidden_layers


@gpu
@needs_gpu
def test_the_kernel_is_right_on_this_gpu():
    assert flex.why_not("cuda") is None


@gpu
@needs_gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_every_architecture_has_the_gradients_of_padded_rows_on_a_gpu(family):
    from tests.properties.test_packed_is_padded import assert_equal, measure, row_by_row

    model, batch = tiny(family).to("cuda"), random_batch().to("cuda")
    assert_equal(measure(model, batch), measure(model, batch, row_by_row), relative=2e-3)


def test_what_does_not_work_is_said(monkeypatch):
    flex.why_not.cache_clear()

    def fails(device):
        raise RuntimeError("no compiler found")

    monkeypatch.setattr(flex, "_error", fails)
    assert flex.why_not("cuda") == ("FlexAttention does not work on this cuda device (RuntimeError: no compiler found)")
    flex.why_not.cache_clear()
    monkeypatch.setattr(flex, "_error", lambda device: 0.5)
    assert flex.why_not("cuda") == "FlexAttention is off by 0.5 on this cuda device"
    flex.why_not.cache_clear()
