from __future__ import annotations

import pytest
import torch

from grpo_trainer.functional.shapes import check_shapes


@pytest.mark.parametrize("shape", [(3,), (2, 3), (0, 3), (2, 3, 4)])
def test_equal_shapes_of_the_right_rank_pass(shape):
    names = " ".join("ABC"[: len(shape)])
    assert check_shapes(names, one=torch.zeros(shape), other=torch.ones(shape)) is None


def test_a_tensor_that_is_none_is_passed_over():
    check_shapes("B T", logprobs=torch.zeros(2, 3), old_logprobs=None)
    check_shapes("B T", old_logprobs=None)


@pytest.mark.parametrize(
    ("names", "shape", "wanted"),
    [("B T", (2,), r"\(B, T\)"), ("B T", (2, 3, 1), r"\(B, T\)"), ("B", (2, 1), r"\(B,\)"), ("B", (), r"\(B,\)")],
)
def test_another_rank_is_refused(names, shape, wanted):
    listing = str(shape).replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(ValueError, match=rf"expected all of shape {wanted}, got mask {listing}$"):
        check_shapes(names, mask=torch.zeros(shape))


@pytest.mark.parametrize("other", [(2, 1), (1, 3), (3, 2)])
def test_sizes_that_torch_would_broadcast_or_confuse_are_refused_with_every_name(other):
    with pytest.raises(ValueError, match=rf"logprobs \(2, 3\), mask \({other[0]}, {other[1]}\)"):
        check_shapes("B T", logprobs=torch.zeros(2, 3), mask=torch.zeros(other))
