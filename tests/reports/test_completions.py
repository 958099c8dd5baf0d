from __future__ import annotations

import math
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from grpo_trainer.reports.completions import (
    CompletionsWriter,
    render_table,
    reward_columns,
    short_prompt,
    write_completions,
)


def rollout(step: int, rows: int = 4, **extra) -> dict:
    return {
        "step": [step] * rows,
        "prompt": [f"What is {i} + 1?" for i in range(rows)],
        "completion": [f"It is {i + 1}." for i in range(rows)],
        "last_integer": [1.0] * rows,
        "short": [None] * rows,
        "advantage": [0.5] * rows,
        "finished": [True] * rows,
        "length": [5] * rows,
        **extra,
    }


def state(step: int, main: bool = True) -> SimpleNamespace:
    return SimpleNamespace(global_step=step, is_world_process_zero=main)


def shown(table, **kwargs) -> str:
    console = Console(width=120, record=True, file=None, quiet=False, force_terminal=False)
    with console.capture() as capture:
        console.print(render_table(table, **kwargs))
    return capture.get()


def test_one_file_per_logged_step_holds_every_rollout_since_the_last(tmp_path):
    writer = CompletionsWriter(tmp_path / "completions")
    writer.on_rollout(None, state(0), None, table=rollout(1))
    writer.on_rollout(None, state(1), None, table=rollout(2, note=["a", "b", "c", "d"]))
    assert not (tmp_path / "completions").exists()  # nothing is logged yet
    writer.on_log(None, state(2), None, logs={})
    writer.on_log(None, state(2), None, logs={"eval_reward": 1.0})  # nothing new: no further file
    writer.on_rollout(None, state(2), None, table=rollout(3))
    writer.on_train_end(None, state(3), None)

    files = sorted(f.name for f in (tmp_path / "completions").iterdir())
    assert files == ["completions_00002.parquet", "completions_00003.parquet"]
    table = pq.read_table(tmp_path / "completions" / files[0])
    assert table.column_names == [
        *("step", "prompt", "completion", "last_integer", "short", "advantage", "finished", "length", "note"),
    ]
    assert table["step"].to_pylist() == [1] * 4 + [2] * 4
    assert table["completion"].to_pylist() == ["It is 1.", "It is 2.", "It is 3.", "It is 4."] * 2
    assert table["last_integer"].to_pylist() == [1.0] * 8
    assert table["note"].to_pylist() == [None] * 4 + ["a", "b", "c", "d"]


def test_only_the_main_process_writes(tmp_path):
    writer = CompletionsWriter(tmp_path / "completions")
    writer.on_rollout(None, state(0, main=False), None, table=rollout(1))
    writer.on_log(None, state(1, main=False), None)
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_is_run_again_replaces_its_file(tmp_path):
    for completion in ("first", "second"):
        writer = CompletionsWriter(tmp_path)
        writer.on_rollout(None, state(0), None, table=rollout(1, rows=1, completion=[completion]))
        writer.on_log(None, state(1), None)
    (file,) = tmp_path.iterdir()
    assert pq.read_table(file)["completion"].to_pylist() == ["second"]


def test_a_reward_that_does_not_apply_is_null_never_zero(tmp_path):
    path = tmp_path / "a.parquet"
    write_completions(path, [rollout(1, rows=3, last_integer=[1.0, math.nan, None])])
    table = pq.read_table(path)
    assert table["last_integer"].to_pylist() == [1.0, None, None]
    assert table["short"].to_pylist() == [None] * 3


def test_mixed_values_of_an_extra_column_become_text(tmp_path):
    path = tmp_path / "a.parquet"
    write_completions(path, [rollout(1, rows=3, found=[1, "none", {"a": [2]}])])
    assert pq.read_table(path)["found"].to_pylist() == ["1", '"none"', '{"a": [2]}']


def test_the_table_has_prompt_completion_rewards_and_advantage():
    text = shown(rollout(1), title="step 1")
    for word in ("step 1", "prompt", "completion", "last_integer", "short", "advantage", "What is 3 + 1?", "It is 4."):
        assert word in text
    assert "1.00" in text and "0.50" in text and "–" in text
    assert "finished" not in text


def test_the_rows_shown_are_spread_over_the_prompts():
    # 8 rows, 2 wanted: the middle of each half, rows 2 and 6
    table = rollout(1, rows=8)
    text = shown(table, rows=2)
    assert [i for i in range(8) if f"What is {i} + 1?" in text] == [2, 6]
    assert shown(table, rows=99).count("What is") == 8


def test_completions_that_look_like_markup_are_shown_as_they_are():
    text = shown(rollout(1, rows=1, completion=["[bold]19[/bold] [/nope]\nnext line"]))
    assert "[bold]19[/bold] [/nope] next line" in text


def test_control_sequences_of_a_completion_do_not_reach_the_terminal():
    text = shown(rollout(1, rows=1, completion=["\x1b[2Jgone\x07"]))
    assert "\x1b" not in text and "\x07" not in text and "gone" in text


def test_an_empty_rollout_can_be_shown():
    assert "completion" in shown(rollout(1, rows=0), rows=3)


def test_reward_columns_leave_out_what_is_fixed_and_what_comes_after():
    assert reward_columns(rollout(1, note=[""] * 4)) == ["last_integer", "short"]


@pytest.mark.parametrize(
    "prompt",
    [
        "<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>user\nWhat is 7 + 12?<|im_end|>\n"
        "<|im_start|>assistant\n",
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nWhat is 7 + 12?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "What is\n 7 + 12?",
    ],
)
def test_a_prompt_is_shown_by_its_last_turn(prompt):
    assert short_prompt(prompt) == "What is 7 + 12?"


def test_a_long_prompt_loses_its_start():
    assert short_prompt("x" * 100 + "the end", width=8) == "…the end"
    assert short_prompt("") == ""
