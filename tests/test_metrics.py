from __future__ import annotations

import math

import pytest
import torch

from grpo_trainer.metrics import MetricStore


def test_a_mean_is_weighted_by_what_it_is_a_mean_of():
    store = MetricStore()
    store.add("entropy", 1.0, 1)  # one token of 1
    store.add("entropy", torch.tensor(9.0), torch.tensor(3.0))  # three tokens of 3
    assert store.reduce() == {"entropy": 2.5}  # 10 / 4, not (1 + 3) / 2


def test_many_small_float32_figures_add_up_without_drift():
    store = MetricStore()
    for _ in range(100):
        store.add("x", torch.tensor(1e8), 1)
        store.add("x", torch.tensor(1.0), 0)
    # 100 * 1e8 + 100 over 100; float32 would lose each 1
    assert store.reduce() == {"x": 1e8 + 1}


def test_several_means_are_added_at_once():
    store = MetricStore()
    store.add_all({"a": (1.0, 2), "b": (torch.tensor(6.0), torch.tensor(3.0))})
    store.add_all({"a": (2.0, 2)})
    assert store.reduce() == {"a": 0.75, "b": 2.0}


def test_a_total_may_come_before_its_count():
    store = MetricStore()
    store.add("seconds", 3.0, 0)
    store.add("seconds", 5.0, 0)
    store.add("seconds", 0.0, 2)
    assert store.reduce() == {"seconds": 4.0}


def test_extremes_keep_the_largest_and_the_smallest():
    store = MetricStore()
    for value in (3.0, torch.tensor(-1.0), 2):
        store.extreme("longest", value, "max")
        store.extreme("shortest", value, "min")
    assert store.reduce() == {"longest": 3.0, "shortest": -1.0}


def test_latest_keeps_the_last_value():
    store = MetricStore()
    store.latest("num_tokens", 10)
    store.latest("num_tokens", 25)
    assert store.reduce() == {"num_tokens": 25}


def test_a_figure_that_was_never_counted_is_missing_and_not_nan():
    store = MetricStore()
    store.add("reward", 0.0, 0)
    store.add("kl", torch.tensor(0.0), torch.tensor(0.0))
    assert store.reduce() == {}


def test_reducing_empties_the_store():
    store = MetricStore()
    store.add("a", 1.0)
    store.extreme("b", 1.0, "max")
    store.latest("c", 1.0)
    assert set(store.reduce()) == {"a", "b", "c"}
    assert store.reduce() == {}
    store.add("a", 5.0)
    assert store.reduce() == {"a": 5.0}


def test_figures_of_all_processes_are_reduced_together_whatever_each_of_them_holds():
    stores = [MetricStore(), MetricStore(), MetricStore()]
    stores[0].add("reward", 1.0, 1)
    stores[1].add("reward", 9.0, 3)
    stores[1].add("kl", 2.0, 4)  # only one process has it
    stores[0].extreme("longest", 5, "max")
    stores[1].extreme("longest", 7, "max")
    stores[2].extreme("shortest", -2, "min")
    for store in stores:
        store.latest("num_tokens", 11)
    sent: list = []
    for store in stores:  # what each process puts into the collective call
        store.reduce(lambda objects: sent.extend(objects) or objects)
    expected = {"reward": 2.5, "kl": 0.5, "longest": 7.0, "shortest": -2.0, "num_tokens": 11}
    empty = MetricStore()
    assert empty.reduce(lambda objects: sent) == expected
    assert MetricStore().reduce(lambda objects: sent[::-1]) == expected


def test_a_figure_holds_no_graph():
    store = MetricStore()
    weight = torch.ones((), requires_grad=True)
    store.add("loss", weight * 2, 1)
    store.extreme("most", weight * 3, "max")
    out = store.reduce()
    assert out == {"loss": 2.0, "most": 3.0}
    assert all(isinstance(v, float) for v in out.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.bool], ids=str)
def test_tensors_of_any_dtype_are_figures(dtype):
    store = MetricStore()
    store.add("x", torch.tensor(1, dtype=dtype), torch.tensor(1, dtype=dtype))
    assert store.reduce() == {"x": 1.0}


def test_an_infinite_figure_is_shown_rather_than_hidden():
    store = MetricStore()
    store.add("x", math.inf, 1)
    assert store.reduce() == {"x": math.inf}
