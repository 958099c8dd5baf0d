from __future__ import annotations

import dataclasses

import pytest
import torch

from grpo_trainer.types import Completions, RolloutBatch, SamplingParams


def batch() -> RolloutBatch:
    """Two prompts, of 1 and 2 tokens, with 2 completions each, of 2, 0, 3 and 1 tokens; every number occurs once."""
    return RolloutBatch(
        prompt_ids=(torch.tensor([90]), torch.tensor([91, 92])),
        prompt_of_row=(0, 0, 1, 1),
        lengths=(2, 0, 3, 1),
        completion_ids=torch.tensor([[1, 2, 0], [0, 0, 0], [5, 6, 7], [8, 0, 0]]),
        mask=torch.tensor([[1, 1, 0], [0, 0, 0], [1, 1, 1], [0, 0, 0]]).bool(),  # the last row is not credited
        advantages=torch.tensor([10.0, 20.0, 30.0, 40.0]),
        old_logprobs=-torch.tensor([[0.1, 0.2, 0.0], [0.0, 0.0, 0.0], [0.5, 0.6, 0.7], [0.8, 0.0, 0.0]]),
    )


def test_its_size_is_its_rows_and_a_prompt_counts_once_per_row():
    assert len(batch()) == 4
    # prompts 1 + 1 + 2 + 2, completions 2 + 0 + 3 + 1
    assert batch().num_tokens == 12


def test_selected_rows_keep_what_belongs_to_them_in_the_order_given():
    part = batch().select([3, 0])
    assert part.lengths == (1, 2)
    assert part.completion_ids.tolist() == [[8, 0], [1, 2]]  # trimmed to the longer of the two
    assert part.mask.tolist() == [[False, False], [True, True]]
    assert part.advantages.tolist() == [40.0, 10.0]
    assert torch.allclose(part.old_logprobs, -torch.tensor([[0.8, 0.0], [0.1, 0.2]]))
    assert [part.prompt_ids[p].tolist() for p in part.prompt_of_row] == [[91, 92], [90]]


def test_only_prompts_in_use_are_kept_and_each_once():
    part = batch().select([2, 3])
    assert [p.tolist() for p in part.prompt_ids] == [[91, 92]]
    assert part.prompt_of_row == (0, 0)


def test_a_split_holds_every_row_once():
    whole = batch()
    parts = [whole.select(range(i, i + 1)) for i in range(4)]
    assert torch.cat([p.advantages for p in parts]).tolist() == whole.advantages.tolist()
    assert [p.completion_ids[0].tolist() for p in parts] == [[1, 2], [], [5, 6, 7], [8]]
    assert sum(p.num_tokens for p in parts) == whole.num_tokens


def test_no_rows_are_legal():
    none = batch().select([])
    assert len(none) == 0 and none.num_tokens == 0
    assert none.completion_ids.shape == none.mask.shape == (0, 0)


def test_what_is_absent_stays_absent():
    part = dataclasses.replace(batch(), old_logprobs=None).select([0])
    assert part.old_logprobs is None and part.ref_logprobs is None


def test_a_move_takes_every_tensor_along_but_the_ids_which_stay_on_the_host():
    moved = batch().to("meta")
    assert {t.device.type for t in (moved.mask, moved.advantages, moved.old_logprobs)} == {"meta"}
    assert {t.device.type for t in (moved.completion_ids, *moved.prompt_ids)} == {"cpu"}
    assert moved.device.type == "meta"
    assert moved.ref_logprobs is None and moved.lengths == batch().lengths
    assert torch.equal(batch().to("cpu").completion_ids, batch().completion_ids)


@pytest.mark.parametrize("value", [batch(), Completions(ids=((1,),), finished=(True,))], ids=lambda v: type(v).__name__)
def test_stations_are_frozen(value):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, dataclasses.fields(value)[0].name, ())


def test_completions_need_a_flag_each():
    assert len(Completions(ids=((1, 2), ()), finished=(True, False))) == 2
    with pytest.raises(ValueError, match="2 completions but 1 finished flags"):
        Completions(ids=((1, 2), ()), finished=(True,))


def test_sampling_leaves_the_distribution_alone_by_default():
    plain = SamplingParams(max_new_tokens=1, eos_token_ids=(1,), pad_token_id=0)
    assert (plain.temperature, plain.top_p, plain.top_k, plain.min_p, plain.repetition_penalty, dict(plain.extra)) == (
        1.0,
        1.0,
        0,
        None,
        1.0,
        {},
    )
