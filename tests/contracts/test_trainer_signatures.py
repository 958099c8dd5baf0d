"""What we take from ``transformers.Trainer`` is there in the installed version: signatures, and facts of its loop.

The facts are observed on a plain Trainer that writes down what it does, without anything of ours but the loader.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from grpo_trainer import GRPOTrainer
from grpo_trainer.resumable import ResumableTrainer
from grpo_trainer.sampler import BatchPlan, RolloutLoader, RolloutSampler, Ticket

REQUIRED = inspect.Parameter.empty

# Every method of the Trainer that we override, with its parameters after self, in order, and their defaults.
OVERRIDDEN: dict[str, dict[str, Any]] = {
    "get_train_dataloader": {},
    "get_eval_dataloader": {"eval_dataset": None},
    "get_batch_samples": {"epoch_iterator": REQUIRED, "num_batches": REQUIRED, "device": REQUIRED},
    "_prepare_inputs": {"inputs": REQUIRED},
    "training_step": {"model": REQUIRED, "inputs": REQUIRED, "num_items_in_batch": None},
    "_track_num_input_tokens": {"inputs": REQUIRED},
    "compute_loss": {
        "model": REQUIRED,
        "inputs": REQUIRED,
        "return_outputs": False,
        "num_items_in_batch": None,
    },
    "evaluation_loop": {
        "dataloader": REQUIRED,
        "description": REQUIRED,
        "prediction_loss_only": None,
        "ignore_keys": None,
        "metric_key_prefix": "eval",
    },
    "log": {"logs": REQUIRED, "start_time": None},
    "train": {"resume_from_checkpoint": None, "trial": None, "ignore_keys_for_eval": None},
    "_load_rng_state": {"checkpoint": REQUIRED},
    "_maybe_log_save_evaluate": {
        **dict.fromkeys(["tr_loss", "grad_norm", "model", "trial", "epoch", "ignore_keys_for_eval"], REQUIRED),
        **{"start_time": REQUIRED, "learning_rate": None},
    },
    "_save_checkpoint": {"model": REQUIRED, "trial": REQUIRED},
    "_get_output_dir": {"trial": REQUIRED},
    "_push_from_checkpoint": {"checkpoint_folder": REQUIRED},
    "floating_point_ops": {"inputs": REQUIRED},
}
# Events of callbacks that ours answer.
EVENTS = ["on_train_begin", "on_step_end", "on_log", "on_train_end"]


def parameters(function: Any) -> dict[str, Any]:
    """Names and defaults of the parameters of a method, without self."""
    return {p.name: p.default for p in list(inspect.signature(function).parameters.values())[1:]}


def overridden() -> set[str]:
    """The methods that our two classes define and the Trainer has too."""
    ours = {**vars(ResumableTrainer), **vars(GRPOTrainer)}
    return {n for n, m in ours.items() if inspect.isfunction(m) and hasattr(Trainer, n)} - {"__init__"}


def test_each_method_that_we_override_is_listed_here():
    assert overridden() == set(OVERRIDDEN)


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_the_trainers_method_has_the_parameters_that_we_expect(name):
    assert parameters(getattr(Trainer, name)) == OVERRIDDEN[name]


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_our_method_can_be_called_as_the_trainers_is(name):
    ours = parameters(getattr(GRPOTrainer, name))
    assert dict(list(ours.items())[: len(OVERRIDDEN[name])]) == OVERRIDDEN[name]
    assert REQUIRED not in list(ours.values())[len(OVERRIDDEN[name]) :]


def test_the_trainer_takes_what_we_hand_on():
    tree = ast.parse(textwrap.dedent(inspect.getsource(GRPOTrainer.__init__)))
    (call,) = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "super().__init__"]
    handed_on = {keyword.arg for keyword in call.keywords}
    assert not call.args
    assert {"model", "args", "processing_class"} <= handed_on <= parameters(Trainer.__init__).keys()


def test_the_trainer_asks_whether_the_loss_is_scaled():
    assert GRPOTrainer.loss_is_scaled_for_ga is True
    assert Trainer.loss_is_scaled_for_ga is None


@pytest.mark.parametrize("event", EVENTS)
def test_callbacks_have_the_events_that_ours_answer(event):
    assert list(parameters(getattr(TrainerCallback, event)))[:3] == ["args", "state", "control"]


# --- facts of the loop -----------------------------------------------------------------------------------------------


class Numbers(Dataset):
    """Ten rows, each its own index."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return index


class Line(torch.nn.Module):
    """One weight, 1 at the start."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.weight * x


class RecordingTrainer(Trainer):
    """A Trainer over tickets that writes down, in order, what its loop does."""

    loss_is_scaled_for_ga = True

    def __init__(self, *args, loader, **kwargs):
        super().__init__(*args, **kwargs)
        self.loader, self.events = loader, []

    def get_train_dataloader(self):
        return self.loader

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        tickets = [next(epoch_iterator) for _ in range(num_batches)]
        items = torch.tensor(float(num_batches))
        self.events.append(("window", num_batches, device, tickets, items))
        return [{"ticket": ticket} for ticket in tickets], items

    def _prepare_inputs(self, inputs):
        self.events.append(("prepare", inputs["ticket"]))
        return inputs

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.events.append(("loss", inputs["ticket"], num_items_in_batch, model.training))
        return model(torch.tensor(2.0))  # each micro-batch has the gradient 2

    def floating_point_ops(self, inputs):
        self.events.append(("flops", inputs["ticket"]))
        return 0

    def evaluation_loop(self, *args, **kwargs):
        self.events.append(("evaluation", args, kwargs))
        return super().evaluation_loop(*args, **kwargs)

    def log(self, logs, start_time=None):
        self.events.append(("log", self.state.global_step))
        super().log(logs, start_time)

    def named(self, name):
        return [event for event in self.events if event[0] == name]


class Steps(TrainerCallback):
    """Writes down the end of each step, and the gradient that the optimizer gets."""

    def __init__(self):
        self.trainer, self.gradients = None, []

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.gradients.append(self.trainer.model.weight.grad.item())

    def on_step_end(self, args, state, control, **kwargs):
        self.trainer.events.append(("step end", state.global_step))


def recorded(tmp_path, *, kind=RecordingTrainer, resume=None, **settings):
    """A run of two epochs of five tickets each (one prompt a rollout, one micro-step), two tickets a step."""
    args = TrainingArguments(
        str(tmp_path),
        **{
            "gradient_accumulation_steps": 2,
            "num_train_epochs": 2,
            "logging_steps": 1,
            "save_strategy": "no",
            "max_grad_norm": 0.0,
            "optim": "sgd",
            "use_cpu": True,
            "disable_tqdm": True,
            "report_to": "none",
            **settings,
        },
    )
    steps = Steps()
    trainer = kind(Line(), args, train_dataset=Numbers(), callbacks=[steps], loader=RolloutLoader(sampler()))
    steps.trainer = trainer
    trainer.train(resume_from_checkpoint=resume)
    return trainer, steps


def sampler():
    plan = BatchPlan(
        per_device_train_batch_size=4,
        world_size=1,
        steps_per_generation=1,
        gradient_accumulation_steps=2,
        num_iterations=1,
        num_generations=2,
    )
    return RolloutSampler(10, plan, shuffle=True, seed=7)


def tickets_of(epoch):
    order = sampler().order(epoch)
    return [Ticket(0, order[i : i + 2]) for i in range(0, 10, 2)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("run"))


def test_micro_batches_are_asked_for_once_per_step_and_fewer_at_the_end_of_an_epoch(run):
    trainer, _ = run
    assert trainer.state.global_step == 6
    assert [event[1] for event in trainer.named("window")] == [2, 2, 1] * 2
    assert all(event[2] == trainer.args.device for event in trainer.named("window"))


def test_each_epoch_goes_through_its_own_permutation(run):
    trainer, _ = run
    drawn = [ticket for event in trainer.named("window") for ticket in event[3]]
    assert drawn == tickets_of(0) + tickets_of(1)
    assert tickets_of(0) != tickets_of(1)


def test_micro_batches_reach_the_loss_in_order_as_they_are_with_the_count(run):
    trainer, _ = run
    expected = [(ticket, event[4]) for event in trainer.named("window") for ticket in event[3]]
    assert [(e[1], e[2]) for e in trainer.named("loss")] == expected
    assert [e[1] for e in trainer.named("prepare")] == [ticket for ticket, _ in expected]
    assert [e[1] for e in trainer.named("flops")] == [ticket for ticket, _ in expected]


def test_the_policy_is_in_training_mode_in_the_loss(run):
    trainer, _ = run
    assert all(event[3] for event in trainer.named("loss"))


def test_a_step_is_window_then_losses_then_its_end_then_the_log(run):
    trainer, _ = run
    names = [event[0] for event in trainer.events if event[0] in {"window", "loss", "step end", "log"}]
    step = ["window", "loss", "loss", "step end", "log"]
    short = ["window", "loss", "step end", "log"]
    assert names == [*step, *step, *short] * 2 + ["log"]  # and the summary of the run


def test_a_loss_that_says_it_is_scaled_is_added_up_as_it_is(run):
    """Two micro-batches of gradient 2, and one at the end of an epoch."""
    _, steps = run
    assert steps.gradients == [4.0, 4.0, 2.0] * 2


def test_a_loss_that_does_not_say_so_is_divided_by_the_micro_batches_of_the_window(tmp_path):
    unscaled = type("Unscaled", (RecordingTrainer,), {"loss_is_scaled_for_ga": False})
    _, steps = recorded(tmp_path, kind=unscaled)
    assert steps.gradients == [2.0, 2.0, 2.0] * 2


def test_a_resumed_run_goes_on_with_the_tickets_that_were_left(tmp_path):
    """Step 4 ends after two of the five tickets of the second epoch."""
    settings = {"save_strategy": "steps", "save_steps": 4}
    recorded(tmp_path, **settings)
    trainer, _ = recorded(tmp_path, resume=str(tmp_path / "checkpoint-4"), **settings)
    assert [event[1] for event in trainer.named("window")] == [2, 1]
    assert [ticket for event in trainer.named("window") for ticket in event[3]] == tickets_of(1)[2:]


def test_evaluation_hands_its_loader_over_with_the_prefix(tmp_path):
    trainer, _ = recorded(tmp_path, num_train_epochs=1)
    seen = {}

    class Stop(Exception):
        pass

    def loop(dataloader, **kwargs):
        seen.update(kwargs, dataloader=dataloader)
        raise Stop

    loader = object()
    trainer.evaluation_loop = loop
    trainer.get_eval_dataloader = lambda eval_dataset=None: loader
    with pytest.raises(Stop):
        trainer.evaluate(eval_dataset=Numbers())
    assert seen.pop("dataloader") is loader
    assert seen["metric_key_prefix"] == "eval"
    assert set(seen) <= set(OVERRIDDEN["evaluation_loop"])
