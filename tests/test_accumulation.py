"""The gradient of a step does not depend on how its rows are shared out, nor on memory that runs out on the way."""

from __future__ import annotations

import dataclasses
import logging
import math

import pytest
import torch

from grpo_trainer.accumulation import Arrangement, spread
from grpo_trainer.policy import scoring
from grpo_trainer.types import Completions, RolloutBatch
from tests.helpers import EOS_ID, tiny_gpt2, tiny_llama
from tests.policy.test_parts import batch_of
from tests.test_trainer import PROMPTS, logs, make

# Eight groups of four; the rewards of the second and the sixth are equal, so they are silent without a KL term.
LENGTHS = [3, 1, 6, 2, 5, 5, 4, 1, 6, 6, 1, 2, 3, 4, 2, 6, 1, 1, 1, 2, 5, 3, 4, 6, 2, 6, 3, 1, 4, 4, 4, 2]


class Fixed:
    def generate(self, prompts, num_samples, sampling, *, seed, row_ids=None, observer=None):
        places = row_ids or [(p, i) for p, n in enumerate(num_samples) for i in range(n)]
        rows = [4 * p + i for p, i in places]
        ids = tuple((*((7 * row + 3 * t) % 90 + 10 for t in range(LENGTHS[row] - 1)), EOS_ID) for row in rows)
        return Completions(ids=ids, finished=tuple(True for _ in rows))


def reward(completion_ids, **kwargs):
    values = [float((31 * sum(ids)) % 17) for ids in completion_ids]
    return [1.0 if i // 4 in (1, 5) else v for i, v in enumerate(values)]


ROWS = [*PROMPTS, {"prompt": "seven", "answer": 6}, {"prompt": "onerous", "answer": 7}]
SETTINGS = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 8,
    "max_steps": 1,
    "gradient_checkpointing": False,
    "learning_rate": 0.05,
    "optim": "sgd",  # which makes nothing large of a rounding error
}
VARIANTS = {
    "dapo": {"loss_type": "dapo"},
    "grpo, KL": {"loss_type": "grpo", "beta": 0.3},
    "the mean of a micro-batch": {"loss_type": "bnpo"},
    "twice": {"loss_type": "dapo", "num_iterations": 2, "max_steps": 2},
    "twice, KL": {"loss_type": "grpo", "num_iterations": 2, "max_steps": 2, "beta": 0.3},
    "steps within a rollout": {
        "loss_type": "dr_grpo",
        "gradient_accumulation_steps": 4,
        "steps_per_generation": 8,
        "max_steps": 2,
    },
    "an entropy bonus": {"loss_type": "dapo", "entropy_coef": 0.2},
    "half of a group": {"loss_type": "dapo", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 16},
}


def run(tmp_path, *, memory=None, model=None, **settings):
    """The gradients of a run's steps, its log and the sizes of its passes; ``memory`` is asked before each."""
    trainer = make(
        tmp_path,
        reward,
        rows=ROWS,
        generator=Fixed(),
        model=model,
        **{**SETTINGS, "shuffle_dataset": False, **settings},
    )
    gradients, passes = [], []

    def note(*args, **kwargs):
        gradients.append(torch.cat([p.grad.flatten().clone() for p in trainer.model.parameters()]))

    trainer.add_callback(_Before(note))
    if memory is not None:
        memory(trainer, passes)
    else:
        count(trainer, passes)
    trainer.train()
    return gradients, trainer, passes


def _Before(note):
    from transformers import TrainerCallback

    class Before(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            note()

    return Before()


def count(trainer, passes):
    def before(model, args, kwargs):
        if not kwargs.get("use_cache", True):
            passes.append(kwargs["input_ids"].numel())

    trainer.model.register_forward_pre_hook(before, with_kwargs=True)


def figures(trainer):
    timed = ("time", "second", "runtime", "flos", "clip_ratio/low_m", "clip_ratio/high_m")  # these: of each pass
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [{k: v for k, v in entry.items() if not any(word in k for word in timed)} for entry in entries]


def assert_same(a, b):
    (got, one, _), (expected, other, _) = a, b
    assert len(got) == len(expected) > 0
    for g, e in zip(got, expected, strict=True):
        assert e.norm() > 0
        assert (g - e).norm() <= 2e-5 * e.norm()
    for x, y in zip(figures(one), figures(other), strict=True):
        assert x.keys() == y.keys()
        for name, value in x.items():
            assert value == pytest.approx(y[name], rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_step_does_not_depend_on_how_many_tokens_are_computed_at_once(variant, tmp_path):
    settings = VARIANTS[variant]
    expected = run(tmp_path / "none", max_tokens_per_microbatch=None, **settings)
    for limit in ("auto", 9, 24, 10_000):
        got = run(tmp_path / str(limit), max_tokens_per_microbatch=limit, **settings)
        assert_same(got, expected)
        if limit == 24:
            assert max(got[2]) <= 24
        if limit == 10_000:
            assert len(got[2]) < len(expected[2])


def test_a_group_that_is_spread_over_micro_batches_is_put_together(tmp_path):
    _, _, apart = run(tmp_path / "a", max_tokens_per_microbatch=None, **VARIANTS["half of a group"])
    _, _, together = run(tmp_path / "b", **VARIANTS["half of a group"])
    assert len(apart) == 12  # six live groups in two halves each
    assert len(together) < len(apart) and sum(together) < sum(apart)


def runs_out(stage, nth):
    """Memory that runs out once: in the nth forward pass, or half-way through the backward pass that follows."""

    def install(trainer, passes):
        error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        state = {"passes": 0, "armed": False, "done": False}

        def before(model, args, kwargs):
            if kwargs.get("use_cache", True):
                return
            state["passes"] += 1
            passes.append(kwargs["input_ids"].numel())
            if state["passes"] == nth and not state["done"]:
                if stage == "forward":
                    state["done"] = True
                    raise error
                state["armed"] = True

        def backward(module, grad_input, grad_output):
            if state["armed"]:
                state["armed"], state["done"] = False, True
                raise error

        trainer.model.register_forward_pre_hook(before, with_kwargs=True)
        if stage == "backward":  # the last layer's gradients have been added by then, the first one's not
            trainer.model.model.layers[0].register_full_backward_hook(backward)
        trainer.told = state

    return install


@pytest.mark.parametrize(
    ("stage", "nth", "variant"),
    [
        ("forward", 1, "dapo"),
        ("forward", 4, "dapo"),
        ("backward", 1, "dapo"),
        ("backward", 5, "dapo"),
        ("backward", 3, "an entropy bonus"),
        ("forward", 2, "twice, KL"),  # of the old log-probs
        ("forward", 12, "twice, KL"),  # of the first training pass over the rollout
        ("backward", 20, "twice, KL"),
        ("backward", 2, "the mean of a micro-batch"),
    ],
)
def test_memory_that_runs_out_changes_nothing_but_the_time(stage, nth, variant, tmp_path, caplog):
    settings = {**VARIANTS[variant], "max_tokens_per_microbatch": None}
    expected = run(tmp_path / "whole", **settings)
    with caplog.at_level(logging.WARNING):
        got = run(tmp_path / "out", memory=runs_out(stage, nth), **settings)
    assert got[1].told["done"]
    assert_same(got, expected)
    said = [r.getMessage() for r in caplog.records if "memory ran out" in r.getMessage()]
    of_training = variant != "twice, KL" or nth > 8  # its old log-probs take 8 passes
    assert len(said) == (1 if of_training else 0)
    if of_training:
        assert f"max_tokens_per_microbatch={got[1].arrangement.fits}" in said[0]
        longest = max(LENGTHS) + max(len(row["prompt"]) for row in PROMPTS)  # a row alone cannot be cut
        assert max(got[2][-4:]) <= max(got[1].arrangement.fits, longest)


def test_what_fits_is_kept_to_from_then_on(tmp_path):
    _, trainer, passes = run(tmp_path, memory=runs_out("forward", 1), max_tokens_per_microbatch=10_000, max_steps=2)
    assert max(passes[1:]) <= trainer.arrangement.fits < passes[0]


def test_memory_that_never_suffices_ends_the_run_with_what_to_change(tmp_path):
    def never(trainer, passes):
        def before(model, args, kwargs):
            if not kwargs.get("use_cache", True):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

        trainer.model.register_forward_pre_hook(before, with_kwargs=True)

    with pytest.raises(MemoryError, match=r"over a single completion of . tokens after a prompt of .*Lower max_compl"):
        run(tmp_path, memory=never, verify_packing="never")


def test_a_micro_batch_whose_tokens_are_compared_is_not_cut(tmp_path):
    with pytest.raises(ValueError, match="max_tokens_per_microbatch=50 would cut micro-batches, but top_entropy_quan"):
        make(tmp_path, top_entropy_quantile=0.5, max_tokens_per_microbatch=50)
    with pytest.raises(MemoryError, match="micro-batch of 4 completions, which cannot be cut, because top_entropy_qua"):
        run(tmp_path, memory=runs_out("forward", 2), top_entropy_quantile=0.5, verify_packing="never")


@pytest.mark.parametrize("value", [0, -3, 2.5, True, "much"])
def test_a_number_of_tokens_is_whole_and_positive(value, tmp_path):
    with pytest.raises(ValueError, match=r"max_tokens_per_microbatch=.* must be a whole number, 1 or more, or 'auto'"):
        make(tmp_path, max_tokens_per_microbatch=value)


def test_automatic_is_what_the_configured_rows_have_at_the_greatest_length():
    # two groups of 2 + (1 + 1) and 2 + (8 + 1): one micro-batch of two rows of 10 tokens holds 4 + 11
    batch = batch_of([([1, 2], [1, 1]), ([3, 4], [8, 1])])
    assert Arrangement(max_tokens="auto", micro_batch=2, block=4)(batch, range(4)) == [[0, 1, 2, 3]]
    assert Arrangement(max_tokens=None, micro_batch=2, block=4)(batch, range(4)) == [[0, 1], [2, 3]]
    assert Arrangement(max_tokens="auto", micro_batch=1, block=4)(batch, range(4)) == [[0, 1], [2], [3]]
    padded = Arrangement(max_tokens="auto", micro_batch=2, block=4, packed=lambda: False)
    assert padded(batch, range(4)) == [[0, 1], [2, 3]]


def test_blocks_are_shared_out_each_for_itself():
    batch = batch_of([([1, 2], [1, 1]), ([1, 2], [1, 1])])
    assert Arrangement(max_tokens=100, micro_batch=2, block=2)(batch, range(4)) == [[0, 1], [2, 3]]
    assert Arrangement(max_tokens=100, micro_batch=2, block=4)(batch, [0, 3]) == [[0, 3]]


def test_the_last_micro_step_has_work_if_any_has():
    for parts in range(1, 9):
        for steps in range(1, 9):
            shares = spread(list(range(parts)), steps)
            assert [part for share in shares for part in share] == list(range(parts))
            assert len(shares) == steps and shares[-1]
            assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_padded_model_is_shared_out_as_well(tmp_path):
    settings = {"loss_type": "dapo"}
    whole, cut = [], []
    for out, limit in ((whole, None), (cut, 26)):
        model = tiny_gpt2()
        model.never_pack = True
        out.append(run(tmp_path / str(limit), model=model, max_tokens_per_microbatch=limit, **settings))
    assert_same(cut[0], whole[0])
    assert max(cut[0][2]) <= 26 < max(whole[0][2])


def test_rows_of_several_batches_are_joined_as_they_are():
    a, b = batch_of([([1, 2], [3, 1])]), batch_of([([3], [5]), ([4, 5, 6], [2, 2])])
    joined = RolloutBatch.join([a, b])
    assert [p.tolist() for p in joined.prompt_ids] == [[1, 2], [3], [4, 5, 6]]
    assert joined.prompt_of_row == (0, 0, 1, 2, 2) and joined.lengths == (3, 1, 5, 2, 2)
    assert torch.equal(joined.select([0, 1]).completion_ids, a.completion_ids)
    assert torch.equal(joined.select([2, 3, 4]).completion_ids, b.completion_ids)
    assert joined.mask.sum() == 13 and joined.old_logprobs is None
    model = tiny_llama()
    a, b, joined = (dataclasses.replace(x, completion_ids=x.completion_ids % 200) for x in (a, b, joined))
    got = scoring.completion_logprobs(model, joined).logprobs
    assert torch.allclose(got[:2, :3], scoring.completion_logprobs(model, a).logprobs, atol=1e-5)


def test_equal_weights_have_a_ratio_of_exactly_1_in_any_arrangement(tmp_path):
    for limit in (None, "auto", 20):
        _, trainer, _ = run(tmp_path / str(limit), max_tokens_per_microbatch=limit, beta=0.5, **VARIANTS["twice"])
        assert logs(trainer, "kl")[0] == 0.0
        assert not math.isnan(logs(trainer, "loss")[0])


def test_a_pass_that_broke_off_is_not_counted_by_the_next_run(tmp_path):
    """An error that is not about memory ends the run; the figures of its last pass are gone with it."""
    trainer = make(tmp_path, reward, generator=Fixed(), rows=ROWS, shuffle_dataset=False, **SETTINGS)
    inner, calls = trainer.accelerator.backward, []

    def backward(loss, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("not about memory")
        inner(loss, **kwargs)

    trainer.accelerator.backward = backward
    with pytest.raises(ValueError, match="not about memory"):
        trainer.train()
    trainer.accelerator.backward = inner
    trainer.model.zero_grad()
    trainer.state.log_history.clear()
    trainer.train()
    fresh = run(tmp_path / "fresh", max_steps=1)[1]
    assert figures(trainer)[0]["entropy"] == pytest.approx(figures(fresh)[0]["entropy"], rel=1e-5)
