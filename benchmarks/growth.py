"""How the time and memory of an update grow with the group and with the prompt, beside TRL: ``growth.py``.

One prompt and its group, bf16, in processes of their own; the first step is left out. TRL gets as many micro-batches as
it needs to stay within 24 GB. Writes benchmarks/results/growth.json and docs/images/growth.png, and prints a table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from processes import RESULTS, run, write_json

GROUPS = [2, 4, 8, 16, 32, 64]
PROMPTS = [64, 256, 1024, 4096]
GROUP, PROMPT = 8, 256
OUT = RESULTS / "growth.json"
PICTURE = Path(__file__).parents[1] / "docs" / "images" / "growth.png"


def measure(name: str, side: str) -> dict[str, float]:
    """Seconds and peak bytes of one update."""
    with tempfile.TemporaryDirectory() as scratch:
        result = run("worker.py", [side, name, "bf16", "update", 2], Path(scratch))
    return {"seconds": statistics.median(result["seconds"][1:]), "bytes": result["peak_bytes"]}


def table(found: dict[str, Any]) -> str:
    """One line a size."""
    lines = [
        "| completions | prompt tokens | seconds: TRL | here | ratio | peak memory: TRL | here |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, each in found.items():
        group, prompt = name.removeprefix("g").split("-q")
        trl, ours = each.get("trl"), each["ours"]
        cells = ["–", f"{ours['seconds']:.2f}", "–", "–", f"{ours['bytes'] / 1e9:.1f} GB"]
        if trl:
            cells[0], cells[2] = f"{trl['seconds']:.2f}", f"{trl['seconds'] / ours['seconds']:.1f}"
            cells[3] = f"{trl['bytes'] / 1e9:.1f} GB"
        lines.append(f"| {group} | {prompt} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def picture(found: dict[str, Any]) -> None:
    """Seconds and bytes against both."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(9, 5.2), layout="constrained")
    for column, (names, values, label) in enumerate(
        (
            ([f"g{n}-q{PROMPT}" for n in GROUPS], GROUPS, f"completions of a prompt of {PROMPT} tokens"),
            ([f"g{GROUP}-q{n}" for n in PROMPTS], PROMPTS, f"tokens of a prompt with {GROUP} completions"),
        )
    ):
        for row, (key, scale, unit) in enumerate((("seconds", 1.0, "seconds"), ("bytes", 1e-9, "peak memory, GB"))):
            axis = axes[row][column]
            for side, text, colour in (("trl", "TRL 1.16", "#b56576"), ("ours", "here", "#2a6f97")):
                points = [
                    (x, found[n][side][key] * scale)
                    for n, x in zip(names, values, strict=True)
                    if side in found.get(n, {})
                ]
                axis.plot(*zip(*points, strict=True), marker="o", color=colour, label=text)
            axis.set_xscale("log", base=2)
            axis.set_xlabel(label)
            axis.set_ylabel(unit)
            axis.set_ylim(bottom=0)
            axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].legend(frameon=False)
    figure.savefig(PICTURE, dpi=130)


def main() -> None:
    """Measures what is not there yet, and draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--again", action="store_true", help="measure everything anew")
    asked = parser.parse_args()
    names = list(dict.fromkeys([f"g{n}-q{PROMPT}" for n in GROUPS] + [f"g{GROUP}-q{n}" for n in PROMPTS]))
    found: dict[str, Any] = {} if asked.again or not OUT.exists() else json.loads(OUT.read_text(encoding="utf-8"))
    for name in names:
        for side in ("ours", "trl"):
            if side not in found.setdefault(name, {}):
                found[name][side] = measure(name, side)
                write_json(OUT, found)
    print(table({name: found[name] for name in names}))
    picture(found)


if __name__ == "__main__":
    main()
