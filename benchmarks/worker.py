"""One trainer, one workload, one process: ``worker.py SIDE WORKLOAD DTYPE WHAT STEPS FOLDER``.

SIDE is ``trl`` or ``ours``. WHAT is ``update`` (fixed completions) or ``step`` (drawn completions, a rollout of
``accumulation`` micro-batches). Writes FOLDER/result.json: seconds of each step, seconds and tokens of each call of the
generator, peak memory; and for ``update`` FOLDER/gradient.pt of the first step.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from workloads import completion, model_source, named, reward, rows


class Clock(TrainerCallback):
    """Seconds of each step, and the first gradient.

    Args:
        whole: from the end of a step to the end of the next; else to the moment where the optimizer is about to move.
    """

    def __init__(self, whole: bool) -> None:
        self.seconds: list[float] = []
        self.gradient: torch.Tensor | None = None
        self._whole = whole
        self._start = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Starts the clock."""
        self._start = time.perf_counter()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Stops it, where the optimizer is left out."""
        if self._whole:
            return
        self._stop()
        if self.gradient is None:
            kept = [p.grad.detach().flatten().clone() for p in model.parameters() if p.grad is not None]
            self.gradient = torch.cat(kept)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Starts it again."""
        if self._whole:
            self._stop()
        self._start = time.perf_counter()

    def _stop(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self._start)


def main(side: str, name: str, dtype: str, what: str, steps: str, folder: str) -> None:
    """Trains, and writes down what it took."""
    workload = named(name)
    torch.manual_seed(0)
    source = model_source()
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    group = workload.generations
    parts = workload.peer_parts if side == "trl" else 1

    def reward_function(completion_ids: Any, number: Any, **kwargs: Any) -> list[float]:
        return [reward(workload, n, list(ids)) for n, ids in zip(number, completion_ids, strict=True)]

    settings = dict(
        output_dir=folder,
        per_device_train_batch_size=workload.prompts * group // parts,
        gradient_accumulation_steps=parts * (workload.accumulation if what == "step" else 1),
        num_generations=group,
        max_completion_length=workload.longest,
        max_steps=int(steps),
        learning_rate=1e-6,
        bf16=dtype == "bf16",
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        save_strategy="no",
        logging_steps=1000,
        gradient_checkpointing=False,
        disable_tqdm=True,
        shuffle_dataset=False,
        max_grad_norm=0.0,
        seed=0,
        **workload.settings,
    )
    clock = Clock(whole=what == "step")
    generation: dict[str, list[float]] = {"seconds": [], "tokens": []}
    trainer = (ours if side == "ours" else theirs)(
        workload, model, tokenizer, reward_function, settings, clock, what, generation
    )
    trainer.train()
    if clock.gradient is not None:
        torch.save(clock.gradient, f"{folder}/gradient.pt")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
    result = {"seconds": clock.seconds, "generation": generation, "peak_bytes": peak}
    Path(f"{folder}/result.json").write_text(json.dumps(result))


def _adapter(workload: Any) -> Any:
    if not workload.lora:
        return None
    from peft import LoraConfig

    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def ours(
    workload: Any, model: Any, tokenizer: Any, reward_function: Any, settings: Any, clock: Any, what: str, log: Any
) -> Any:
    """Our trainer, with fixed completions or with a clock around its generation."""
    from grpo_trainer import GRPOConfig, GRPOTrainer
    from grpo_trainer.types import Completions

    trainer = GRPOTrainer(
        model,
        reward_function,
        GRPOConfig(**settings),
        Dataset.from_list(rows(workload, 64)),
        processing_class=tokenizer,
        callbacks=[clock],
        peft_config=_adapter(workload),
    )

    class Fixed:
        def generate(self, prompts: Any, num_samples: Any, sampling: Any, **kwargs: Any) -> Completions:
            pairs = [(list(p), i) for p, n in zip(prompts, num_samples, strict=True) for i in range(n)]
            ids = tuple(tuple(completion(workload, tokenizer, p, i)) for p, i in pairs)
            return Completions(ids=ids, finished=(True,) * len(ids))

    if what == "update":
        trainer.collector.generator = Fixed()
        return trainer
    inner = trainer.collector.generator.generate

    def generate(*args: Any, **kwargs: Any) -> Completions:
        start = time.perf_counter()
        drawn = inner(*args, **kwargs)
        log["seconds"].append(time.perf_counter() - start)
        log["tokens"].append(sum(map(len, drawn.ids)))
        return drawn

    trainer.collector.generator.generate = generate
    return trainer


def theirs(
    workload: Any, model: Any, tokenizer: Any, reward_function: Any, settings: Any, clock: Any, what: str, log: Any
) -> Any:
    """TRL's trainer, likewise."""
    import trl

    trainer = trl.GRPOTrainer(
        model,
        reward_function,
        trl.GRPOConfig(**settings),
        Dataset.from_list(rows(workload, 64)),
        processing_class=tokenizer,
        callbacks=[clock],
        peft_config=_adapter(workload),
    )
    inner = trainer._generate_single_turn

    def generate(prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        if what == "update":
            group = workload.generations
            return [completion(workload, tokenizer, p, i % group) for i, p in enumerate(prompt_ids)], None
        start = time.perf_counter()
        drawn = inner(prompt_ids, *args, **kwargs)
        log["seconds"].append(time.perf_counter() - start)
        log["tokens"].append(sum(map(len, drawn[0])))
        return drawn

    trainer._generate_single_turn = generate
    return trainer


if __name__ == "__main__":
    main(*sys.argv[1:])
