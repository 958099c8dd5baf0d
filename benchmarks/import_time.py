"""Seconds to import grpo_trainer, against transformers' Trainer.

    python benchmarks/import_time.py [RUNS]

Each import runs in a new interpreter. The statements take turns, so that what else the machine does falls on all of
them alike; the first turn warms the disk cache and is not counted. The time includes starting the interpreter.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

STATEMENTS = (
    "pass",
    "import grpo_trainer",
    "from grpo_trainer import GRPOTrainer",
    "from transformers import Trainer",
)
PEER = STATEMENTS[-1]


def measure(statement: str) -> float:
    """Wall seconds of one new interpreter that runs ``statement``."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", statement], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{statement!r} failed:\n{done.stderr}")
    return time.perf_counter() - start


def main(runs: int) -> None:
    """Prints the median and the range for each statement, and its ratio to the peer's."""
    seconds: dict[str, list[float]] = {statement: [] for statement in STATEMENTS}
    for turn in range(runs + 1):
        for statement in STATEMENTS:
            taken = measure(statement)
            if turn:
                seconds[statement].append(taken)
    peer = statistics.median(seconds[PEER])
    print(f"{'statement':40} {'median s':>9} {'min':>6} {'max':>6} {'ratio':>6}   ({runs} runs each)")
    for statement, taken in seconds.items():
        median = statistics.median(taken)
        print(f"{statement:40} {median:9.3f} {min(taken):6.3f} {max(taken):6.3f} {median / peer:6.2f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 7)
