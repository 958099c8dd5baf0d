"""What both trainers are given: prompts, and completions that are fixed, so that both do the same work."""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MODEL = os.environ.get("BENCH_MODEL", "builtin:smollm2-135m-instruct")
SHOTS = 8


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One shape of work.

    Attributes:
        prompts: prompts of a micro-batch, which is the whole optimizer step where completions are fixed.
        generations: completions of each.
        shortest, longest: tokens of a completion; lengths are spread evenly between.
        text: ``sums``, ``gsm8k`` or ``8shot``.
        accumulation: micro-batches of an optimizer step where completions are drawn.
        silent: share of the groups whose completions all earn the same.
        lora: whether an adapter is trained.
        settings: further fields of both configurations.
        prompt_tokens: about how long a prompt is made, with ``text`` set to ``long``.
        peer_parts: micro-batches that TRL is given for each of ours, where ours takes it more than 24 GB of memory.
    """

    prompts: int
    generations: int = 8
    shortest: int = 40
    longest: int = 128
    text: str = "gsm8k"
    accumulation: int = 2
    silent: float = 0.0
    lora: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    peer_parts: int = 1
    prompt_tokens: int = 0


PEER_TOKENS = 5000
"""About the most tokens, padded, of a micro-batch for which 24 GB suffice TRL with a model of this size."""


def growing(generations: int, prompt_tokens: int) -> Workload:
    """One prompt and its group, of sizes to be compared with others.

    Args:
        generations: completions of the prompt.
        prompt_tokens: about how long it is.

    Returns:
        The workload.
    """
    padded = generations * (prompt_tokens + 64)
    parts = next(n for n in range(1, generations + 1) if generations % n == 0 and padded / n <= PEER_TOKENS)
    return Workload(
        prompts=1,
        generations=generations,
        shortest=32,
        longest=64,
        text="long",
        prompt_tokens=prompt_tokens,
        peer_parts=parts,
    )


def named(name: str) -> Workload:
    """A workload by its name; ``g16-q256`` is sixteen completions of a prompt of 256 tokens."""
    if name in WORKLOADS:
        return WORKLOADS[name]
    group, prompt = name.split("-")
    return growing(int(group.removeprefix("g")), int(prompt.removeprefix("q")))


WORKLOADS = {
    "sums": Workload(prompts=4, shortest=6, longest=24, text="sums"),
    "gsm8k": Workload(prompts=2),
    "8shot": Workload(prompts=1, text="8shot", peer_parts=2),
    "half_dead": Workload(prompts=4, silent=0.5),
    "lora": Workload(prompts=2, lora=True, settings={"beta": 0.04}),
}


def model_source() -> str:
    """What ``from_pretrained`` is given: the model's folder or name."""
    from grpo_trainer.builtin import resolve_builtin

    return str(resolve_builtin(MODEL)) if MODEL.startswith("builtin:") else MODEL


def rows(workload: Workload, count: int) -> list[dict[str, Any]]:
    """Dataset rows with a conversational prompt.

    Args:
        workload: says of which kind.
        count: how many.

    Returns:
        The rows.
    """
    draw = random.Random(0)
    if workload.text == "sums":
        pairs = [(draw.randint(1, 20), draw.randint(1, 20)) for _ in range(count)]
        texts = [f"What is {a} + {b}? Answer with a number." for a, b in pairs]
    elif workload.text == "long":
        words = " ".join(p["question"] for p in gsm8k()).split()
        size = round(workload.prompt_tokens * 0.75)  # of this text, in words
        texts = [" ".join(words[i : i + size]) for i in range(count)]
    else:
        problems = gsm8k()
        shots = "".join(f"Question: {p['question']}\nAnswer: {p['answer']}\n\n" for p in problems[:SHOTS])
        head = shots if workload.text == "8shot" else ""
        chosen = problems[SHOTS : SHOTS + count]
        texts = [f"{head}Question: {p['question']}\nAnswer:" if head else p["question"] for p in chosen]
    return [{"prompt": [{"role": "user", "content": text}], "number": i} for i, text in enumerate(texts)]


def completion(workload: Workload, tokenizer: Any, prompt_ids: list[int], place: int) -> list[int]:
    """The completion of a prompt at a place in its group: text of the kind that a model would write.

    Args:
        workload: says how long.
        tokenizer: of the model.
        prompt_ids: the prompt.
        place: in the group, from 0.

    Returns:
        Token ids; the last one ends the completion.
    """
    draw = random.Random(f"{sum(prompt_ids)} {len(prompt_ids)} {place}")
    length = workload.shortest + round(
        (workload.longest - workload.shortest) * place / max(workload.generations - 1, 1)
    )
    if workload.text == "sums":
        text = f"The sum of {draw.randint(1, 20)} and {draw.randint(1, 20)} is {draw.randint(2, 40)}. " * 4
    else:
        text = " ".join(p["answer"] for p in draw.sample(gsm8k(), 4))
    return [*tokenizer(text)["input_ids"][: length - 1], tokenizer.eos_token_id]


def reward(workload: Workload, number: int, completion_ids: list[int]) -> float:
    """What a completion earns: the same for all of a group that is to be silent."""
    if number % workload.prompts < workload.silent * workload.prompts:
        return 1.0
    return float(sum(completion_ids) % 17)


_problems: list[dict[str, str]] = []


def gsm8k() -> list[dict[str, str]]:
    """Word problems: from the JSON lines that the environment variable GSM8K names, or made up and of like length."""
    if not _problems:
        path = os.environ.get("GSM8K")
        if path:
            with Path(path).open(encoding="utf-8") as lines:
                _problems.extend(json.loads(line) for _, line in zip(range(400), lines, strict=False))
        else:
            _problems.extend(_made_up(i) for i in range(400))
    return _problems


def _made_up(i: int) -> dict[str, str]:
    draw = random.Random(i)
    name, thing = draw.choice(["Ana", "Ben", "Chidi", "Dana", "Emeka"]), draw.choice(["pencils", "apples", "stamps"])
    a, b, c = draw.randint(3, 40), draw.randint(2, 9), draw.randint(2, 30)
    return {
        "question": f"{name} has {a} boxes with {b} {thing} in each of them. On Monday {name} gives {c} {thing} to a "
        f"friend, and on Tuesday a neighbour brings {c + b} more {thing} in a paper bag. How many {thing} does {name} "
        "have in the end, if none is lost on the way home?",
        "answer": f"At first {name} has {a} * {b} = <<{a}*{b}={a * b}>>{a * b} {thing}.\nAfter Monday there are "
        f"{a * b} - {c} = <<{a * b}-{c}={a * b - c}>>{a * b - c} {thing} left.\nOn Tuesday {c + b} come on top, which "
        f"makes {a * b - c} + {c + b} = <<{a * b - c}+{c + b}={a * b + b}>>{a * b + b} {thing}.\n#### {a * b + b}",
    }
