"""What a run would do and need, told before it is done: ``--dry_run``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from grpo_trainer.reports.first_prompt import HEAD, TAIL, printable

_STATES = {"sgd": 0, "lion": 1, "rmsprop": 1, "adagrad": 1, "adamw": 2, "ademamix": 3, "adam": 2}
"""Beginning of an optimizer's name -> numbers that it keeps per parameter."""
_LEFT_OUT = "activations, logits, the cache of generation, and what libraries hold"


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The figures of a run.

    Attributes:
        processes: W.
        num_generations: G.
        prompts_per_rollout: P, over all processes.
        passes: how often each rollout is trained on.
        micro_batch: completions of a micro-batch on one process.
        micro_batches_per_rollout: of one process, in one pass.
        micro_batches_per_step: of one process.
        steps_per_epoch: optimizer steps; None for a stream.
        steps: optimizer steps in all.
        rows: training rows; None for a stream.
        trainable: parameters that are trained.
        parameters: all of the model's.
        memory: what -> bytes on each process; None where no estimate is known.
        first_prompt: the first prompt, as the model reads it.
    """

    processes: int
    num_generations: int
    prompts_per_rollout: int
    passes: int
    micro_batch: int
    micro_batches_per_rollout: int
    micro_batches_per_step: int
    steps_per_epoch: int | None
    steps: int
    rows: int | None
    trainable: int
    parameters: int
    memory: dict[str, int | None] = field(default_factory=dict)
    first_prompt: str = ""

    @property
    def completions_per_step(self) -> int:
        """Completions that an optimizer step is made of, over all processes."""
        return self.micro_batch * self.processes * self.micro_batches_per_step

    def lines(self) -> list[str]:
        """The plan as lines for a terminal."""
        group, step = self.num_generations, self.completions_per_step
        epoch = "an epoch has no known length (a stream)" if self.rows is None else f"{self.steps_per_epoch} per epoch"
        known = [size for size in self.memory.values() if size is not None]
        parts = ", ".join(f"{what} {gigabytes(size)}" for what, size in self.memory.items() if size != 0)
        return [
            f"processes        {self.processes}",
            f"a rollout        {self.prompts_per_rollout} prompts x {group} completions = "
            f"{self.prompts_per_rollout * group}, on each process {self.micro_batches_per_rollout} micro-batches of "
            f"{self.micro_batch}, {self.passes} {'pass' if self.passes == 1 else 'passes'}",
            f"optimizer step   {step} completions of {step / group:g} prompts, on each process "
            f"{self.micro_batches_per_step} micro-batches of {self.micro_batch}",
            f"optimizer steps  {self.steps} in all, {epoch}",
            f"parameters       {self.trainable:,} trained of {self.parameters:,}",
            f"memory           at least {gigabytes(sum(known))} on each process: {parts}",
            f"                 (left out: {_LEFT_OUT})",
            HEAD,
            self.first_prompt,
            TAIL,
        ]


def gigabytes(size: int | None) -> str:
    """A size for people.

    Args:
        size: bytes; None if it is not known.

    Returns:
        The text.

    Example:
        >>> gigabytes(5_460_000_000), gigabytes(1_230_000), gigabytes(0), gigabytes(None)
        ('5.46 GB', '1.2 MB', '0 MB', 'not estimated')
    """
    if size is None:
        return "not estimated"
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB" if size else "0 MB"


def plan_of(trainer: Any) -> RunPlan:
    """The plan of a trainer that has been made and not run.

    Args:
        trainer: a ``GRPOTrainer``; nothing about it changes, but a stream is read up to its first rollout.

    Returns:
        The plan.
    """
    args, batches = trainer.args, trainer.plan
    loader = trainer.get_train_dataloader()
    ticket = next(iter(loader))
    stream = ticket.rows is not None
    per_epoch = None if stream else math.ceil(len(loader) / args.gradient_accumulation_steps)
    steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * (per_epoch or 0))
    row = ticket.rows[0] if stream else trainer.train_dataset[ticket.prompts[0]]
    prompt = trainer.collector.limit.fit(trainer.collector.renderer(row), "the first row")
    return RunPlan(
        processes=batches.world_size,
        num_generations=batches.num_generations,
        prompts_per_rollout=batches.prompts_per_rollout,
        passes=batches.num_iterations,
        micro_batch=batches.per_device_train_batch_size,
        micro_batches_per_rollout=batches.steps_per_generation,
        micro_batches_per_step=batches.gradient_accumulation_steps,
        steps_per_epoch=per_epoch,
        steps=steps,
        rows=None if stream else len(trainer.train_dataset),
        trainable=sum(count(p) for p in trainer.model.parameters() if p.requires_grad),
        parameters=sum(count(p) for p in trainer.model.parameters()),
        memory=memory_of(trainer),
        first_prompt=printable(prompt.text),
    )


def memory_of(trainer: Any) -> dict[str, int | None]:
    """What a process will hold of the model for as long as it trains.

    Args:
        trainer: made and not run.

    Returns:
        What -> bytes; None where no estimate is known.
    """
    weights = list(trainer.model.parameters())
    trained = [p for p in weights if p.requires_grad]
    gradients = sum(p.numel() * p.element_size() for p in trained)
    own = {p.data_ptr() for p in weights}
    reference = [t for t in _tensors(trainer.collector.reference) if t.data_ptr() not in own]
    parts: dict[str, int | None] = {
        "weights": sum(p.numel() * p.element_size() for p in weights),
        "gradients": gradients,
        "optimizer": optimizer_bytes(str(getattr(trainer.args.optim, "value", trainer.args.optim)), trained),
        "reference": sum(t.numel() * t.element_size() for t in reference),
    }
    if trainer.plan.world_size > 1:
        parts["buckets of DDP"] = gradients
    return parts


def optimizer_bytes(name: str, trained: list[Any]) -> int | None:
    """What an optimizer keeps per parameter, over all parameters.

    Args:
        name: a value of ``optim``.
        trained: the parameters.

    Returns:
        Bytes; None for an optimizer whose states are not known here.

    Example:
        >>> import torch
        >>> weights = [torch.zeros(100, 100)]
        >>> [optimizer_bytes(name, weights) for name in ("adamw_torch", "paged_adamw_8bit", "sgd", "muon")]
        [80000, 20000, 0, None]
    """
    plain = name.removeprefix("paged_").removeprefix("stable_").removeprefix("schedule_free_")
    states = next((number for start, number in _STATES.items() if plain.startswith(start)), None)
    if states is None:
        return None
    size = 1.0 if "8bit" in name else 0.5 if "4bit" in name else None
    # bitsandbytes keeps small tensors in float32
    return round(
        sum(states * p.numel() * (4 if size and p.numel() < 4096 else size or p.element_size()) for p in trained)
    )


def count(parameter: Any) -> int:
    """The weights that a parameter stands for: two in each byte if it is in 4 bits."""
    return parameter.numel() * (2 * parameter.element_size() if type(parameter).__name__ == "Params4bit" else 1)


def _tensors(holder: Any) -> Iterator[Any]:
    """The tensors that an object holds, directly, in a module or in a mapping."""
    for value in vars(holder).values() if holder is not None else ():
        if hasattr(value, "parameters"):
            yield from value.parameters()
        elif isinstance(value, dict):
            yield from (tensor for tensor in value.values() if hasattr(tensor, "element_size"))
