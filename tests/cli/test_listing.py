from __future__ import annotations

from grpo_trainer.cli import main
from grpo_trainer.functional.advantages import ADVANTAGES
from grpo_trainer.functional.losses import POLICY_LOSSES
from grpo_trainer.objective import LOSS_TYPES
from grpo_trainer.rewards import REWARDS


def test_list_shows_every_name_with_a_line_about_it(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["list"]) == 0
    lines = [line.strip().split(None, 1) for line in capsys.readouterr().out.splitlines()]
    shown = {words[0]: words[1:] for words in lines if words}
    for name in ["quickstart/smollm2-135m-sums", "builtin:sums", *LOSS_TYPES, *POLICY_LOSSES, *ADVANTAGES, *REWARDS]:
        assert shown[name], name
    assert shown["last_integer"] == ["1.0 where the last number in the completion is the answer, 0.0 elsewhere."]
    assert "SmolLM2-135M-Instruct learns to add" in shown["quickstart/smollm2-135m-sums"][0]
