"""``rewards check`` finds each way in which rewards and data do not fit, and ``rewards try`` explains a text."""

from __future__ import annotations

import json

import pytest

from grpo_trainer.cli import main
from grpo_trainer.cli.reward_check import Scorer, check, references_of
from grpo_trainer.rewards.base import RewardSet
from grpo_trainer.rewards.maths import last_integer
from grpo_trainer.rewards.options import with_options

ROWS = [{"prompt": f"What is {n} + {n}?", "answer": 2 * n} for n in (1, 2, 3)]


def report_of(*functions, rows=ROWS, samples=(), library=(), weights=None):
    scorer = Scorer(RewardSet(list(functions), weights), lambda text: list(text.encode()))
    try:
        return check(scorer, rows, references_of(rows, None)[1], samples, library)
    finally:
        scorer.close()


def test_rewards_that_fit_have_nothing_off():
    report = report_of(last_integer, samples=[["2", "3"], ["4", "4"], ["6", "5"]])
    (line,) = report.lines
    assert report.off == [] and report.notes == []
    assert (line.reference, line.nonsense, line.sampled, line.none) == (1.0, 0.0, 4 / 6, 0.0)
    assert line.spread == report.signal == 2 / 3  # the second prompt's completions are both right
    assert report.form == "as it is" and line.milliseconds > 0


def test_a_form_that_is_asked_for_is_found():
    def in_a_box(completions, answer, **kwargs):
        return [float(f"\\boxed{{{right}}}" in text) for text, right in zip(completions, answer, strict=True)]

    assert report_of(in_a_box).form == "in a box"
    assert report_of(in_a_box).off == []


def never(completions, **kwargs):
    return [0.0] * len(completions)


def always(completions, **kwargs):
    return [1.0] * len(completions)


def half(completions, answer, **kwargs):
    return [0.5 * r for r in last_integer(completions, answer)]


def absent(completions, **kwargs):
    return [None] * len(completions)


def likes_nonsense(completions, **kwargs):
    return [float("asdf" in text) for text in completions]


def any_number(completions, answer, **kwargs):
    return [float(text.strip().isdecimal()) for text in completions]


def raising(completions, **kwargs):
    raise KeyError("no such column")


@pytest.mark.parametrize(
    ("functions", "library", "said"),
    [
        ([never], [], "'empty' scores as much as the reference answer on 3 of 3 rows"),
        ([always], [], "'nonsense' scores as much as the reference answer on 3 of 3 rows"),
        ([likes_nonsense], [], "'nonsense' scores as much as the reference"),
        ([any_number], [], "'the answer of another row' scores as much as the reference answer on 3 of 3 rows"),
        ([half], ["half"], "half: the reference answer does not score full marks on 3 of 3 rows, e.g. row 0, '2': 0.5"),
        ([last_integer, absent], [], "absent applied to nothing: it was None for every completion"),
        ([raising], [], "raising failed: KeyError: 'no such column'"),
    ],
)
def test_what_does_not_fit_is_said(functions, library, said):
    off = report_of(*functions, library=library).off
    assert any(sentence.startswith(said) for sentence in off), off


def test_rewards_of_the_form_alone_are_told_as_such():
    def a_number(completions, **kwargs):
        return [float(text.strip().isdecimal()) for text in completions]

    report = report_of(a_number)
    assert report.off == []
    assert "'the answer of another row' scores as much" in report.notes[0] and "the form alone" in report.notes[0]


def test_two_rewards_that_ask_for_different_forms_are_found():
    """No text gets full marks of both: whoever trains on them has a ceiling that he does not know of."""

    def starts_with_a_box(completions, **kwargs):
        return [float(text.startswith("\\boxed")) for text in completions]

    def no_box(completions, answer, **kwargs):
        pairs = zip(completions, answer, strict=True)
        return [float("boxed" not in text and last_integer([text], [right]) == [1.0]) for text, right in pairs]

    def box(completions, answer, **kwargs):
        return [float("boxed" in text and str(right) in text) for text, right in zip(completions, answer, strict=True)]

    off = report_of(no_box, box).off
    assert any("does not score full marks on 3 of 3 rows" in sentence for sentence in off), off


def test_equal_totals_everywhere_are_no_signal():
    off = report_of(last_integer, samples=[["2", "2"], ["5", "5"]]).off
    assert [sentence for sentence in off if sentence.startswith("no signal: the model's 2 completions")]


def test_a_time_limit_that_is_hit_is_counted():
    def slow(completions, **kwargs):
        import time

        if completions[0] == "I do not know.":
            time.sleep(60)
        return [float(completions[0] == "2")]

    limited = with_options(slow, isolation="process", time_limit=0.5, rows_per_call=1)
    report = report_of(limited, rows=ROWS[:1])
    assert report.lines[0].troubles == {"timeouts": 1}
    assert "slow: 1 completions with timeouts" in report.off


def test_references_are_looked_for_and_their_absence_is_said():
    assert references_of([{"prompt": "a", "solution": "x"}, {"prompt": "b"}], None) == ("solution", ["x", None])
    with pytest.raises(ValueError, match="--reference gold: there is no such column; there are prompt, answer"):
        references_of(ROWS, "gold")
    report = report_of(always, rows=[{"prompt": "a"}])
    assert report.off == [] and "no reference answers" in report.notes[0]


@pytest.fixture
def recipe(tmp_path):
    rows = [{"question": f"What is {n} + {n}?", "answer": f"Twice. #### {2 * n}"} for n in range(1, 9)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    file = tmp_path / "recipe.yaml"
    file.write_text(
        f"model_name_or_path: nowhere\ndataset_name: {tmp_path}/rows.jsonl\ndataset_prompt_column: question\n"
        "dataset_map_fn: grpo_trainer.tasks:gsm8k_answer\nreward_funcs:\n  - last_integer\n"
        "  - {name: think_answer_format, weight: 0.5}\nreport_to: none\n"
    )
    return str(file)


def test_check_prints_a_table_and_ends_with_0(recipe, capsys):
    assert main(["rewards", "check", recipe, "--no_model", "--rows", "4"]) == 0
    shown = capsys.readouterr().out
    assert "4 rows, references from the column 'answer'" in shown and "nothing is off" in shown
    assert "references score best in answer tags" in shown
    assert "last_integer" in shown and "think_answer_format" in shown


def test_check_ends_with_1_if_something_is_off(recipe, capsys):
    assert main(["rewards", "check", recipe, "--no_model", "--reward_funcs", "readability"]) == 1
    shown = capsys.readouterr().out
    assert "off: readability applied to nothing: it was None" in shown and "off: 'empty' scores as much" in shown


def test_try_explains_each_part(recipe, capsys):
    text = "<think>Twice.</think> <answer>6</answer>"
    assert main(["rewards", "try", recipe, "--completion", text, "--row", "2"]) == 0
    shown = capsys.readouterr().out
    assert "row 2: What is 3 + 3?" in shown and "answer: 6" in shown
    assert "last_integer: 1 x 1   1.0 where the last number" in shown
    assert "think_answer_format: 1 x 0.5" in shown and "total: 1.5" in shown
    assert main(["rewards", "try", recipe, "--completion", "7"]) == 0
    assert "total: 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["try"], "give a text with --completion"),
        (["try", "--completion", "a", "--row", "99"], "--row 99: the data has 8 rows, 0 to 7"),
        (["try", "--completion", "a", "--rows", "3"], "rewards try takes --completion, --row, not --rows"),
        (["try", "--completion", "a", "b"], "--completion takes one value"),
        (["check", "--rows", "0", "--no_model"], "--rows 0: give a whole number, at least 1"),
        (["check", "--reference", "gold", "--no_model"], "--reference gold: there is no such column"),
        (["check", "--reward_funcs", "last_integr", "--no_model"], "Did you mean 'last_integer'"),
        (["check"], "nowhere"),
    ],
)
def test_a_wrong_option_is_one_sentence(recipe, words, said, capsys):
    assert main(["rewards", words[0], recipe, *words[1:]]) == 2
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error


def test_check_draws_samples_of_the_model(recipe, tmp_path, tiny_llama, tiny_tokenizer, capsys):
    tiny_llama(max_position_embeddings=512).save_pretrained(tmp_path / "tiny")
    tiny_tokenizer.save_pretrained(tmp_path / "tiny")
    words = f"--model_name_or_path {tmp_path}/tiny --max_completion_length 4 --use_cpu --per_device_train_batch_size 4"
    words += " --num_generations 4 --samples 3"
    code = main(["rewards", "check", recipe, *words.split(), "--rows", "2"])
    shown = capsys.readouterr().out
    assert code == 1  # a random model's completions are all equally wrong
    assert "0% of 2 sampled prompts" in shown and "off: no signal: the model's 3 completions" in shown
