from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers.trainer_callback import CallbackHandler, TrainerControl, TrainerState


class FakeTrainer:
    """Plays the trainer without a model: each step rewards a little more. It calls callbacks as the real one does."""

    made: list[FakeTrainer]

    def __init__(self, model, reward_funcs, args, train_dataset, eval_dataset=None, callbacks=None, **kwargs):
        self.model_name, self.reward_funcs, self.args = model, reward_funcs, args
        self.train_dataset, self.eval_dataset, self.kwargs = train_dataset, eval_dataset, kwargs
        self.callbacks = list(callbacks or [])
        self.state = TrainerState(max_steps=args.max_steps, logging_steps=1, is_world_process_zero=True)
        self.control = TrainerControl()
        self.before_step = lambda step: None
        self.resumed_from = None
        self.exit_code = 0
        self.sampled: list[tuple[int, int]] = []
        type(self).made.append(self)

    def remove_callback(self, kind):
        self.callbacks = [c for c in self.callbacks if not isinstance(c, kind)]

    def _call(self, event, **kwargs):
        handler = CallbackHandler(self.callbacks, None, None, None, None)
        if event == "on_rollout":
            for callback in self.callbacks:
                if hasattr(callback, event):
                    callback.on_rollout(self.args, self.state, self.control, **kwargs)
        else:
            self.control = getattr(handler, event)(self.args, self.state, self.control, **kwargs)

    def stop_after_step(self, exit_code):
        self.exit_code = exit_code

    def train(self, resume_from_checkpoint=None):
        self.resumed_from = resume_from_checkpoint
        if resume_from_checkpoint:
            self.state = TrainerState.load_from_json(str(Path(resume_from_checkpoint) / "trainer_state.json"))
            self.state.is_world_process_zero = True
        self._call("on_train_begin")
        for step in range(self.state.global_step + 1, self.args.max_steps + 1):
            self.before_step(step)
            self._call("on_step_begin")
            self._call("on_rollout", table=self._table(step))
            self.state.global_step = step
            self._call("on_step_end")
            logs = {"reward": step / 10, "time/generation": 2.0, "time/update": 3.0, "step": step}
            self.state.log_history.append(logs)
            self._call("on_log", logs=logs)
            if self.exit_code and step < self.args.max_steps:
                folder = Path(self.args.output_dir) / f"checkpoint-{step}"
                folder.mkdir()
                self.state.save_to_json(str(folder / "trainer_state.json"))
                (folder / "optimizer.pt").touch()
                self._call("on_save")
                self._call("on_train_end")
                raise SystemExit(self.exit_code)
        self._call("on_train_end")

    def sample(self, dataset, num_generations, *, temperature=None, seed=0):
        assert temperature == 1.0
        self.sampled.append((len(dataset), seed))
        rows = [dataset[i] for i in range(len(dataset))]
        right = self.state.global_step > 0
        texts = [[f"It is {row.get('answer') if right else 0}."] * num_generations for row in rows]
        rewards = torch.tensor([[float(right)] * num_generations for _ in rows], dtype=torch.float64)
        return SimpleNamespace(rows=rows, completions=texts, rewards=rewards)

    def save_model(self, folder):
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / "config.json").write_text("{}")

    @staticmethod
    def _table(step):
        return {
            "step": [step] * 2,
            "prompt": ["What is 7 + 12?"] * 2,
            "completion": ["18", "19"],
            "last_integer": [0.0, 1.0],
            "advantage": [-0.7, 0.7],
            "finished": [True, True],
            "length": [3, 3],
        }


@pytest.fixture
def fake_trainer(monkeypatch):
    """Puts the fake in the real trainer's place; its attribute ``made`` lists those that were made."""
    import grpo_trainer

    kind = type("FakeTrainer", (FakeTrainer,), {"made": []})
    monkeypatch.setitem(vars(grpo_trainer), "GRPOTrainer", kind)  # not setattr, which would import the real one
    return kind


@pytest.fixture
def recipe_file(tmp_path):
    """Writes a recipe of the given text and returns its path."""

    def write(text: str = "", name: str = "recipe.yaml") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write
