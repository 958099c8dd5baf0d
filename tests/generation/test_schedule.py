from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_trainer.generation.schedule import PREFILL_TOKENS, Batch, Schedule, prefill_batches


def rows_of(batches) -> list[tuple[int, int]]:
    return [(batch.prompt, c) for batch in batches for c in batch.completions]


def test_everything_begins_at_once_if_there_is_room():
    schedule = Schedule([3, 9, 5], [2, 1, 0], max_new_tokens=4, max_cache_tokens=39)  # 3 rows of 9 + 4
    assert schedule.waiting == 3
    assert rows_of(schedule.next_rows(0, 0)) == [(1, 0), (0, 0), (0, 1)]  # the longest prompt first
    assert schedule.waiting == 0 and schedule.next_rows(0, 0) == []


def test_a_group_begins_when_it_fits_whole():
    schedule = Schedule([6, 6, 6], [2, 2, 2], max_new_tokens=4, max_cache_tokens=49)  # 4 places of 10
    assert rows_of(schedule.next_rows(0, 0)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert schedule.next_rows(3, 6) == []  # one place is free
    assert rows_of(schedule.next_rows(2, 6)) == [(2, 0), (2, 1)]


def test_a_group_too_large_for_the_cache_is_torn_apart():
    schedule = Schedule([6], [5], max_new_tokens=4, max_cache_tokens=20)
    assert [rows_of(schedule.next_rows(n, 6 if n else 0)) for n in (0, 1, 0, 0)] == [
        [(0, 0), (0, 1)],
        [],
        [(0, 2), (0, 3)],
        [(0, 4)],
    ]


def test_places_are_counted_at_the_greatest_length_of_any_row_in_flight():
    # a short prompt joins a long one: both are 20 + 5 wide, so 50 tokens hold them, 49 do not
    for room, second in [(50, [(1, 0)]), (49, [])]:
        schedule = Schedule([20, 2], [1, 1], max_new_tokens=5, max_cache_tokens=room)
        first = rows_of(schedule.next_rows(0, 0))
        assert first + rows_of(schedule.next_rows(1, 20)) == [(0, 0), *second]
        assert rows_of(schedule.next_rows(0, 0)) == ([] if second else [(1, 0)])


def test_places_are_refilled_an_eighth_at_a_time():
    schedule = Schedule([6] * 100, [1] * 100, max_new_tokens=4, max_cache_tokens=320)  # 32 places
    assert len(rows_of(schedule.next_rows(0, 0))) == 32
    assert schedule.next_rows(29, 6) == []
    assert len(rows_of(schedule.next_rows(28, 6))) == 4


def test_room_for_less_than_one_completion_is_refused():
    with pytest.raises(ValueError, match=r"max_cache_tokens=20 .* 17 tokens.* is 4; set it to at least 21"):
        Schedule([3, 17], [1, 1], max_new_tokens=4, max_cache_tokens=20)
    Schedule([3, 17], [1, 0], max_new_tokens=4, max_cache_tokens=20)  # nothing is drawn for the long one


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 6)), min_size=1, max_size=8),
    st.integers(1, 10),
    st.integers(40, 200),
    st.randoms(use_true_random=False),
)
def test_every_row_begins_once_and_the_room_is_kept(prompts, new, room, random):
    lengths, counts = [n for n, _ in prompts], [g for _, g in prompts]
    schedule = Schedule(lengths, counts, new, room)
    flying: list[tuple[int, int]] = []
    begun = []
    while flying or schedule.waiting:
        batches = schedule.next_rows(len(flying), max((lengths[p] for p, _ in flying), default=0))
        flying += rows_of(batches)
        begun += rows_of(batches)
        assert flying, "nothing is in flight and nothing begins"
        assert len(flying) * (max(lengths[p] for p, _ in flying) + new) <= room
        random.shuffle(flying)
        del flying[: random.randint(1, len(flying))]
    assert sorted(begun) == [(p, c) for p, g in enumerate(counts) for c in range(g)]


def test_prefills_are_cut_where_padding_would_cost_more_than_another_pass():
    def cut(*lengths):
        parts = prefill_batches([Batch(p, range(1)) for p in range(len(lengths))], lengths)
        return [[lengths[batch.prompt] for batch in part] for part in parts]

    assert cut(7, 3, 1) == [[7, 3, 1]]
    assert cut(100, 100, 36, 5) == [
        [100, 100, 36],
        [5],
    ]  # 64 of padding is cheap, 64 + 95 of 400 is more than a quarter
    assert cut(1000, 800, 700, 100) == [[1000, 800, 700], [100]]  # 500 of 3000
    assert cut(3000, 2900, 100) == [[3000], [2900], [100]]  # two would be more than the most
    assert PREFILL_TOKENS < 6000


def test_padding_is_compared_with_what_is_computed():
    batches = [Batch(0, range(1)), Batch(1, range(1))]
    assert len(prefill_batches(batches, [1000, 800])) == 1  # 200 of 2000
    assert len(prefill_batches(batches, [1000, 800], shared=600)) == 1  # 200 of 800
    assert len(prefill_batches(batches, [1000, 800], shared=601)) == 2  # 200 of 798
