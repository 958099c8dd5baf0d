from __future__ import annotations

import pytest

from grpo_trainer.cli import main
from grpo_trainer.cli.shipped import launcher_files, recipe_names
from grpo_trainer.functional.advantages import ADVANTAGES
from grpo_trainer.functional.correction import CORRECTIONS
from grpo_trainer.functional.losses import POLICY_LOSSES
from grpo_trainer.functional.ratios import RATIOS
from grpo_trainer.objective import LOSS_TYPES
from grpo_trainer.rewards import REWARDS


def test_list_shows_every_name_with_a_line_about_it(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["list"]) == 0
    lines = [line.strip().split(None, 1) for line in capsys.readouterr().out.splitlines()]
    shown = {words[0]: words[1:] for words in lines if words}
    objective = [*LOSS_TYPES, *POLICY_LOSSES, *RATIOS, *ADVANTAGES, *CORRECTIONS]
    for name in ["quickstart/smollm2-135m-sums", "builtin:sums", *objective, *REWARDS]:
        assert shown[name], name
    assert shown["last_integer"] == ["1.0 where the last number in the completion is the answer, 0.0 elsewhere."]
    assert "SmolLM2-135M-Instruct learns to add" in shown["quickstart/smollm2-135m-sums"][0]


def test_files_for_the_launcher_are_shown_where_they_lie(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    main(["list"])
    shown = capsys.readouterr().out
    for path in launcher_files():
        assert path.is_file() and str(path) in shown


@pytest.mark.parametrize("width", [40, 59, 80])
def test_a_narrow_terminal_breaks_lines_between_words_only(capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    main(["list"])
    narrow = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "300")
    main(["list"])
    assert narrow.split() == capsys.readouterr().out.split()
    names = [*recipe_names(), *map(str, launcher_files())]
    told = [line for line in narrow.splitlines() if line.startswith(" ") and line.strip() not in names]
    assert max(map(len, told)) <= width
