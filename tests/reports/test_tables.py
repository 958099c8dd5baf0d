from __future__ import annotations

import re

import pytest
from rich.console import Console

from grpo_trainer.reports.tables import html_table, render_table, reward_columns, short_prompt, unique_prompts
from tests.helpers import completions_table as rollout


def shown(table, **kwargs) -> str:
    console = Console(width=120, record=True, file=None, quiet=False, force_terminal=False)
    with console.capture() as capture:
        console.print(render_table(table, **kwargs))
    return capture.get()


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


def test_html_has_the_same_rows_and_figures():
    table = rollout(1, rows=8)
    page = html_table(table, rows=2, title="Step 1")
    assert page.startswith('<table><caption style="text-align:left">Step 1</caption><thead><tr>')
    assert re.findall("<th [^>]*>([^<]*)</th>", page) == ["prompt", "completion", "last_integer", "short", "advantage"]
    cells = re.findall("<td [^>]*>([^<]*)</td>", page)
    assert cells == [
        *("What is 2 + 1?", "It is 3.", "1.00", "–", "0.50"),
        *("What is 6 + 1?", "It is 7.", "1.00", "–", "0.50"),
    ]


def test_what_a_model_writes_is_no_html():
    page = html_table(rollout(1, rows=1, completion=["<img src=x onerror=alert(1)> & \x1b[2J"]), title="<b>")
    assert "<img" not in page and "&lt;img src=x onerror=alert(1)&gt; &amp;" in page
    assert "<b>" not in page and "\x1b" not in page


def test_one_row_per_distinct_prompt_is_its_first():
    # 2 prompts x 4 completions, the groups apart: 8 rows, 2 prompts
    table = rollout(1, rows=8, prompt=["a", "a", "b", "b", "a", "b", "a", "b"], note=list("stuvwxyz"))
    unique = unique_prompts(table)
    assert unique["prompt"] == ["a", "b"] and unique["note"] == ["s", "u"]
    assert unique["completion"] == ["It is 1.", "It is 3."]
    assert list(unique) == list(table)
    assert unique_prompts(rollout(1, rows=0))["prompt"] == []
