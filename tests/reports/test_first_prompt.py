from __future__ import annotations

from types import SimpleNamespace

from grpo_trainer.reports.first_prompt import HEAD, MOST, TAIL, FirstPrompt, printable

PROMPT = "<|im_start|>user\n2 + [bold]2[/bold]?<|im_end|>\n<|im_start|>assistant\n"


def show(callback, *prompts, main=True):
    """As the trainer calls a callback that listens."""
    if hasattr(callback, "on_rollout"):
        state = SimpleNamespace(is_world_process_zero=main)
        callback.on_rollout(None, state, None, table={"prompt": list(prompts), "completion": ["4"] * len(prompts)})


def test_the_first_prompt_is_shown_once_with_every_marker(capsys):
    callback = FirstPrompt()
    show(callback, PROMPT, "another")
    show(callback, "a later one")
    assert capsys.readouterr().out == f"{HEAD}\n{PROMPT}\n{TAIL}\n"


def test_it_listens_no_longer_than_needed_on_any_process():
    """While somebody listens, the completions of all processes are gathered; so all must leave off together."""
    for main in (True, False):
        callback = FirstPrompt()
        assert hasattr(callback, "on_rollout")
        show(callback, PROMPT, main=main)
        assert not hasattr(callback, "on_rollout")


def test_only_the_main_process_shows_it(capsys):
    show(FirstPrompt(), PROMPT, main=False)
    assert capsys.readouterr().out == ""


def test_each_run_shows_its_own(capsys):
    show(FirstPrompt(), "one")
    show(FirstPrompt(), "two")
    assert capsys.readouterr().out.count(HEAD) == 2


def test_a_long_prompt_loses_its_middle():
    assert printable("a" * MOST) == "a" * MOST
    shown = printable("a" * MOST + "b" * MOST)
    assert shown == "a" * (MOST // 2) + f"\n… {MOST} characters …\n" + "b" * (MOST // 2)


def test_control_sequences_do_not_reach_the_terminal():
    assert printable("a\x1b[2J\r\n\tb\u202e") == "a\ufffd[2J\ufffd\n\tb\ufffd"


def test_a_terminal_that_cannot_show_it_ends_no_run(monkeypatch, caplog):
    def fail(*args, **kwargs):
        raise BrokenPipeError("nobody reads")

    monkeypatch.setattr("builtins.print", fail)
    show(FirstPrompt(), PROMPT)
    (record,) = caplog.records
    assert "the first prompt is not shown" in record.getMessage()
