from __future__ import annotations

import pytest

from grpo_trainer.cli.errors import RecipeError
from grpo_trainer.cli.launch import check_joined, check_processes, started_processes

ONE_OF_TWO = {"WORLD_SIZE": "2", "ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1"}
# what `accelerate launch --cpu --num_processes 2` tells the one process that it starts
ALONE = {"ACCELERATE_USE_CPU": "True", "ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1"}


def test_the_launcher_tells_how_many_it_started():
    assert [started_processes(e) for e in ({}, {"WORLD_SIZE": "1"}, ONE_OF_TWO, {"WORLD_SIZE": ""})] == [1, 1, 2, 1]


@pytest.mark.parametrize(("wanted", "environ"), [(None, {}), (1, {}), (2, ONE_OF_TWO), (None, ONE_OF_TWO)])
def test_the_right_number_needs_no_word(wanted, environ):
    assert check_processes(wanted, environ) is None


def test_another_number_than_the_recipe_is_made_for_is_refused():
    with pytest.raises(
        RecipeError, match=r"num_processes=7, but 1 process runs: .*accelerate launch .*num_processes 7"
    ):
        check_processes(7, {})
    with pytest.raises(
        RecipeError, match=r"num_processes=1, but 2 processes run: start it with `grpo-trainer train …`"
    ):
        check_processes(1, ONE_OF_TWO)


def test_a_launcher_that_started_one_of_several_is_told():
    told = check_processes(None, ALONE)
    assert told is not None and "asked for several processes and started one" in told
    assert "accelerate/cpu.yaml --num_processes N" in told
    # asked for one, it names no meeting point
    assert check_processes(None, {"ACCELERATE_MIXED_PRECISION": "no"}) is None
    # and a meeting point alone is somebody else's
    assert check_processes(None, {"MASTER_ADDR": "10.0.0.1"}) is None


def test_processes_that_would_train_apart_are_refused():
    check_joined(2, ONE_OF_TWO)
    check_joined(1, {})
    with pytest.raises(RecipeError, match=r"started 2 processes \(WORLD_SIZE\), but 1 would train together"):
        check_joined(1, ONE_OF_TWO)
