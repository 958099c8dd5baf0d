"""One process of the seam test: trains a tiny model on fixed completions and writes down all that happened.

Run by ``tests/properties/test_seam.py``, alone or under torchrun, as ``seam_worker.py FOLDER CASES ROWS``: CASES is a
JSON mapping from a case's name to its settings, ROWS the rows of a micro-batch. Writes FOLDER/CASE/rank*.json and .pt.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback

from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.types import Completions
from tests.helpers import tiny_llama, tiny_tokenizer


class FixedGenerator:
    """Completions that are a function of the prompt and of the sample's place in its group, whoever asks.

    Lengths differ from 1 to 7 tokens, so that a wrong normaliser shows. ``places`` holds, for each prompt that this
    process completes, the places of its samples: of a group spread over processes, each draws some.
    """

    def __init__(self, places):
        self.places = places
        self.calls = []

    def generate(self, prompts, num_samples, sampling, *, seed, row_ids=None, observer=None):
        self.calls.append([list(p) for p in prompts])
        ids = []
        for prompt, places in zip(prompts, self.places, strict=True):
            for place in places:
                draw = torch.Generator().manual_seed(sum(prompt) * 31 + place)
                length = int(torch.randint(1, 8, (1,), generator=draw))
                ids.append(tuple(torch.randint(4, 200, (length,), generator=draw).tolist()))
        # those of an untrained model are about -log 256, so some of these are far off
        told = tuple(tuple(-5.545 + (token % 9 - 4) / 20 for token in row) for row in ids)
        return Completions(ids=tuple(ids), finished=(True,) * len(ids), sampling_logprobs=told)


class Recorder(TrainerCallback):
    """Gradients as they are when the optimizer is about to use them."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.gradients = []

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        parameters = self.trainer.model.named_parameters()
        self.gradients.append({n: p.grad.clone() for n, p in parameters})


def reward(completion_ids, **kwargs):
    return [float(sum(ids) % 17) / 8 for ids in completion_ids]


def main(out: str, settings: dict) -> None:
    config = GRPOConfig(
        out,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        learning_rate=1e-2,
        max_grad_norm=0.0,
        num_generations=4,
        max_completion_length=8,
        optim="sgd",
        ddp_find_unused_parameters=False,
        **settings,
    )
    tokenizer = tiny_tokenizer()
    rows = Dataset.from_list([{"prompt": chr(ord("A") + i) * (1 + i % 3)} for i in range(9)])
    trainer = GRPOTrainer(tiny_llama(), reward, config, rows, processing_class=tokenizer)
    plan = trainer.plan
    places = {}
    for row in plan.rows(config.process_index):
        places.setdefault(row // 4, []).append(row % 4)
    generator = FixedGenerator(list(places.values()))
    trainer.collector.generator = generator
    recorder = Recorder(trainer)
    trainer.add_callback(recorder)

    used, syncs = [], []
    inner = trainer.training_step

    def training_step(model, inputs, num_items_in_batch=None):
        used.append(
            [part.completion_ids[i, :n].tolist() for part in inputs["parts"] for i, n in enumerate(part.lengths)]
        )
        if isinstance(model, DistributedDataParallel):
            syncs.append([trainer.state.global_step, model.require_backward_grad_sync])
        return inner(model, inputs, num_items_in_batch)

    trainer.training_step = training_step
    trainer.train()
    order = [trainer.get_train_dataloader().batch_sampler.order(epoch) for epoch in range(2)]
    logs = [
        {k: v for k, v in entry.items() if "time" not in k and "second" not in k} for entry in trainer.state.log_history
    ]
    facts = {
        "world_size": config.world_size,
        "calls": generator.calls,
        "used": used,
        "syncs": syncs,
        "order": order,
        "prompts": [tokenizer(text)["input_ids"] for text in rows["prompt"]],
        "steps": trainer.state.global_step,
        "logs": logs,
    }
    Path(out).mkdir(parents=True, exist_ok=True)
    name = f"{out}/rank{config.process_index}"
    Path(f"{name}.json").write_text(json.dumps(facts))
    torch.save({"gradients": recorder.gradients, "weights": trainer.model.state_dict()}, f"{name}.pt")


if __name__ == "__main__":
    folder, cases, micro_batch = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    for case, case_settings in cases.items():
        main(f"{folder}/{case}", {**case_settings, "per_device_train_batch_size": micro_batch})
