"""Table and picture of benchmarks/results/latest.json, put into docs/performance.md: ``report.py``."""

from __future__ import annotations

import json
import platform
import re
from datetime import date
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
LATEST = Path(__file__).parent / "results" / "latest.json"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
TITLES = {
    "sums": "sums: 4 prompts × 8, completions of 6–24 tokens",
    "gsm8k": "GSM8K: 2 × 8, 40–128",
    "8shot": "8-shot GSM8K: 1 × 8, 40–128",
    "half_dead": "GSM8K, 4 × 8, half of the groups silent",
    "lora": "GSM8K, 2 × 8, LoRA r 16, beta 0.04",
}


def processor() -> str:
    """The machine in words."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    name = re.search(r"model name\s*: (.*)", text)
    extras = [flag for flag in ("amx_bf16", "avx512_bf16") if flag in text]
    cores = len(re.findall(r"^processor\s*:", text, re.MULTILINE))
    return f"{name[1] if name else 'CPU'}, {cores} cores, {', '.join(extras) or 'no bf16 instructions'}"


def table(rows: list[dict[str, Any]]) -> str:
    """One line per workload and dtype: seconds, bytes, ratios, gradient difference."""
    known = {(r["workload"], r["dtype"], r["what"]): r for r in rows}
    lines = [
        "| workload | dtype | seconds: TRL | here | ratio | peak memory: TRL | here | ratio | gradient difference |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for workload, title in TITLES.items():
        for dtype in ("bf16", "fp32"):
            time, memory = known.get((workload, dtype, "update")), known.get((workload, dtype, "memory"))
            if time is None or memory is None:
                continue
            lines.append(
                f"| {title} | {dtype} | {time['trl']:.2f} | {time['ours']:.2f} | **{time['ratio']:.1f}** | "
                f"{memory['trl'] / 1e9:.1f} GB | {memory['ours'] / 1e9:.1f} GB | {memory['ratio']:.1f} | "
                f"{time['gradient_error']:.0e} |"
            )
    return "\n".join(lines)


def picture(rows: list[dict[str, Any]], path: Path) -> None:
    """Ratios as bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 2.8), sharey=True, layout="constrained")
    for axis, what, label in zip(
        axes, ("update", "memory"), ("update: times faster", "peak memory: times less"), strict=True
    ):
        for i, (dtype, colour) in enumerate((("bf16", "#2a6f97"), ("fp32", "#a9d6e5"))):
            found = {r["workload"]: r["ratio"] for r in rows if r["what"] == what and r["dtype"] == dtype}
            places = [k + (i - 0.5) * 0.36 for k in range(len(TITLES))]
            bars = axis.barh(places, [found.get(name, 0.0) for name in TITLES], 0.34, color=colour, label=dtype)
            axis.bar_label(bars, fmt="%.1f", padding=2, fontsize=8)
        axis.axvline(1, color="0.3", lw=0.8)
        axis.set_yticks(range(len(TITLES)), list(TITLES))
        axis.set_xlabel(label)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    axes[1].legend(frameon=False)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Writes both."""
    rows = json.loads(LATEST.read_text(encoding="utf-8"))
    runs = min(len(r["runs"]["ours"]) for r in rows)
    picture(rows, DOCS / "images" / "update.png")
    page = DOCS / "performance.md"
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    times = "One process" if runs == 1 else f"Median of {runs} processes"
    measured = (
        f"{times} of each side, taking turns, {date.today().isoformat()}, {processor()}.\n\n{table(rows)}\n\n"
        "![how many times faster, how many times less memory](images/update.png)"
    )
    page.write_text(f"{before}{BEGIN}\n{measured}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
