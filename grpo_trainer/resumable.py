"""A Trainer whose runs can be killed anywhere and go on as if nothing had happened.

What it adds to ``transformers.Trainer``: checkpoints that are complete or not there, random states that come back
before they are used, sums of losses that go on, and SIGTERM. What else a run depends on is the subclass's to say.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import TrainOutput, rotate_checkpoints
from transformers.utils import logging

from grpo_trainer.checkpoint import (
    RunState,
    changed_settings,
    clear_unfinished,
    draft_of,
    find_checkpoint,
    save_settings,
    sole_run,
    state_file,
    writing,
)
from grpo_trainer.preemption import EXIT_CODE, TerminationNotice

logger = logging.get_logger(__name__)

_LAYOUT = {
    *("world_size", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("steps_per_generation", "num_iterations", "num_generations"),
}
"""Settings without which a rollout that waits in a checkpoint cannot be used."""


class ResumableTrainer(Trainer):
    """A Trainer with exact resume. docs/resume.md says what a checkpoint holds.

    A subclass says what its own runs depend on: ``_course``, ``_run_state`` and ``_take_run_state``.

    Args:
        *args: as for the Trainer.
        **kwargs: as for the Trainer.
    """

    control: TrainerControl

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._checkpoint: str | None = None  # that this run goes on from
        self._rng_due = False  # whether its random states are still to be taken up
        self._draft_dir: str | None = None  # stands for the output folder while a checkpoint is written
        self._losses_since = 0  # the step since which the Trainer's sum of losses counts
        self._termination = TerminationNotice()
        self._asked = 0  # exit code with which this process was asked to leave the run
        self._leaving = 0  # the same, agreed upon by all processes
        self._saved_step = -1  # of the last checkpoint
        self._warned: set[str] = set()
        self.add_callback(_Seam(self._take_up, self._heed_requests))

    # --- for the subclass -----------------------------------------------------------------------------------------

    def _course(self) -> dict[str, Any]:
        """The settings that the course of the run depends on."""
        return {}

    def _run_state(self) -> RunState:
        """What the rest of the run depends on and the Trainer does not save."""
        return RunState()

    def _take_run_state(self, state: RunState, *, same_layout: bool) -> None:
        """Takes it up again; with another layout, batches that wait cannot be used."""

    # --- a run and its parts --------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Trains. A run that goes on from a checkpoint ends as it would have without the break.

        SIGTERM, by which a scheduler announces that it takes the machine back, lets the step finish and saves a
        checkpoint, in whichever process it arrives.

        Args:
            resume_from_checkpoint: a checkpoint's folder; True for the last one in ``output_dir``, which starts anew
                if there is none; None or False starts anew.
            trial: of a hyperparameter search.
            ignore_keys_for_eval: not used.

        Returns:
            Steps, mean loss and figures.

        Raises:
            ValueError: if the folder is no checkpoint that a run can go on from, or another run uses ``output_dir``.
            SystemExit: with code 143, after SIGTERM and its checkpoint; or as `stop_after_step` was told.
        """
        with sole_run(self.args.output_dir) if self.is_world_process_zero() else contextlib.nullcontext():
            if self.is_world_process_zero():
                clear_unfinished(self.args.output_dir)
            self.accelerator.wait_for_everyone()
            return self._train(resume_from_checkpoint, trial, ignore_keys_for_eval)

    def _train(
        self, resume_from_checkpoint: str | bool | None, trial: Any, ignore_keys_for_eval: list[str] | None
    ) -> TrainOutput:
        """As ``train``, in a folder that is this run's alone."""
        self._checkpoint = find_checkpoint(self.args.output_dir, resume_from_checkpoint)
        if resume_from_checkpoint and self._checkpoint is None:
            logger.warning("there is no checkpoint in %s to go on from: the run starts anew", self.args.output_dir)
        self._rng_due = self._checkpoint is not None
        self._leaving = 0
        self.current_flos = 0  # those of a run that was broken off are not this run's
        try:
            with self._termination:
                output = super().train(self._checkpoint, trial, ignore_keys_for_eval)
        finally:
            self.is_in_train = False  # the Trainer says so only of a run that came to its end
            self._asked = 0
            self._end_run()
        return output._replace(training_loss=self._mean_loss())

    def _end_run(self) -> None:
        """Gives back what only a run needs, however it ended."""

    def _take_up(self) -> None:
        """Goes on where the checkpoint was written: called when the Trainer has loaded its own part of it."""
        self._losses_since = self.state.global_step
        if self._checkpoint is None:
            return
        self.state.compute_steps(self.args, self.state.max_steps)  # by what is set now, not by the checkpoint
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True  # it is finished; see get_batch_samples
        changed = changed_settings(self._checkpoint, self._course())
        for name, (then, now) in changed.items():
            self._warn_once(
                f"changed {name}",
                f"{name} was {then} when {self._checkpoint} was written and is {now} now: the run goes on, but not as "
                "it would have without the break",
            )
        if not state_file(self._checkpoint, self.args.process_index).is_file():
            self._warn_once(
                "no state",
                f"{self._checkpoint} holds no state of this trainer for a run with {self.args.world_size} processes: a "
                "rollout that was in use is drawn afresh",
            )
            return
        state = RunState.load(self._checkpoint, self.args.process_index, self.args.device)
        self._tr_loss += state.loss
        self._total_loss_scalar = state.loss_total
        self._losses_since = state.losses_since
        self._globalstep_last_logged = state.last_logged
        self._take_run_state(state, same_layout=not _LAYOUT.intersection(changed))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Hands figures to the callbacks; the mean loss of a run is that of all its parts.

        Args:
            logs: the figures.
            start_time: of the training run.
        """
        if "train_loss" in logs:
            logs["train_loss"] = self._mean_loss()
        super().log(logs, start_time)

    def _mean_loss(self) -> float:
        """Over all steps of the run, also those before a break, unless they are not known."""
        return self._total_loss_scalar / max(self.state.global_step - self._losses_since, 0.001)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Once per run that goes on: the Trainer asks again after the first rollout, which has drawn by then."""
        if self._rng_due:
            self._rng_due = False
            super()._load_rng_state(checkpoint)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Writes a checkpoint that is complete or not there."""
        run_dir = self._get_output_dir(trial)
        final = os.path.join(run_dir, f"checkpoint-{self.state.global_step}")
        draft = draft_of(final)
        with writing(final) if self.args.should_save else contextlib.nullcontext():
            self.accelerator.wait_for_everyone()  # the draft's folder is there, and empty
            self._draft_dir = str(draft.parent)
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self._draft_dir = None
            if not self.args.save_only_model:
                self._save_run_state(draft)
            if self.state.best_model_checkpoint == str(draft):
                self.state.best_model_checkpoint = final
                if self.args.should_save:
                    self.state.save_to_json(str(draft / TRAINER_STATE_NAME))
            self.accelerator.wait_for_everyone()  # every process has written its part
        self.accelerator.wait_for_everyone()
        self._saved_step = self.state.global_step
        if self.args.push_to_hub:
            self._push_from_checkpoint(final)
        if self.args.should_save:
            rotate_checkpoints(
                output_dir=run_dir,
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )

    def _save_run_state(self, folder: Path) -> None:
        state = self._run_state()
        state.loss = self._tr_loss.item()
        state.loss_total = self._total_loss_scalar
        state.losses_since = self._losses_since
        state.last_logged = self._globalstep_last_logged
        state.save(folder, self.args.process_index)
        if self.args.should_save:
            save_settings(folder, self._course())

    def _get_output_dir(self, trial: Any) -> str:
        """The output folder; while a checkpoint is written, the folder of drafts."""
        return self._draft_dir or super()._get_output_dir(trial)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Uploads a checkpoint when it lies in its place, since the upload goes on in the background."""
        if self._draft_dir is None:
            super()._push_from_checkpoint(checkpoint_folder)

    def stop_after_step(self, exit_code: int = EXIT_CODE) -> None:
        """Asks the run to leave when its current optimizer step is over, logged and saved, as SIGTERM does.

        To be called from a signal's handler, a callback or another thread. Of several processes one is enough, and all
        of them leave. In the last step of a run it does nothing.

        Args:
            exit_code: of the ``SystemExit`` by which ``train`` is left, 1 to 255; the highest wins.

        Raises:
            ValueError: if the code is out of range.
        """
        if not 1 <= exit_code <= 255:
            raise ValueError(f"exit_code={exit_code} must be from 1 to 255, as an operating system takes it")
        self._asked = max(self._asked, exit_code)

    def _agreed_exit_code(self) -> int:
        """The code with which to leave the run, 0 to go on; every process must ask at the same point."""
        own = max(self._asked, EXIT_CODE if self._termination.given else 0)
        if self.args.world_size == 1:
            return own
        return int(self.accelerator.gather(torch.tensor([own], device=self.args.device)).max().item())

    def _maybe_log_save_evaluate(
        self,
        tr_loss: Any,
        grad_norm: Any,
        model: nn.Module,
        trial: Any,
        epoch: float,
        ignore_keys_for_eval: list[str] | None,
        start_time: float,
        learning_rate: float | None = None,
    ) -> None:
        """Leaves the run when its step is logged and saved, if a process was asked to.

        Not by way of ``should_training_stop``: the end of a run tidies up, which an interrupted one must not.

        Args:
            tr_loss: as for the Trainer.
            grad_norm: as for the Trainer.
            model: the policy, as wrapped for training.
            trial: of a hyperparameter search.
            epoch: as for the Trainer.
            ignore_keys_for_eval: not used.
            start_time: of the training run.
            learning_rate: of the step.

        Raises:
            SystemExit: with the code that was agreed upon, after the checkpoint.
        """
        super()._maybe_log_save_evaluate(
            tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time, learning_rate=learning_rate
        )
        if not self._leaving or self.state.global_step >= self.state.max_steps:
            return
        if self._saved_step != self.state.global_step:  # what an evaluation says may overrule what was asked for
            self._save_checkpoint(model, trial)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        raise SystemExit(self._leaving)

    def _heed_requests(self, control: TrainerControl) -> None:
        """At the end of a step: every process asks, whether it was told or not."""
        self._leaving = self._agreed_exit_code()
        if self._leaving:
            control.should_save = True
            self.args.save_only_model = False  # the run is to go on from it

    def _warn_once(self, key: str, message: str) -> None:
        if key not in self._warned and self.is_world_process_zero():
            self._warned.add(key)
            logger.warning(message)


class _Seam(TrainerCallback):
    """Calls the trainer at two points of the Trainer's loop that have no method to override.

    Args:
        take_up: called when training begins, with everything that the Trainer restores from a checkpoint in place.
        end_step: called when an optimizer step is over, before it is logged.
    """

    def __init__(self, take_up: Callable[[], None], end_step: Callable[[TrainerControl], None]) -> None:
        self._take_up = take_up
        self._end_step = end_step

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Takes up what the run goes on from."""
        self._take_up()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Ends the step."""
        self._end_step(control)
