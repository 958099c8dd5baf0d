"""The documentation says what the code does: every name has its row, every row its name, every example runs."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import trl
from datasets import Dataset
from packaging.version import Version
from transformers import TrainingArguments

from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.builtin import BUILTIN_MODELS, PREFIX
from grpo_trainer.functional.advantages import ADVANTAGES, MULTI_REWARD_ADVANTAGES
from grpo_trainer.functional.aggregation import AGGREGATIONS
from grpo_trainer.functional.correction import CORRECTIONS
from grpo_trainer.functional.kl import KL_ESTIMATORS
from grpo_trainer.functional.losses import POLICY_LOSSES
from grpo_trainer.functional.ratios import RATIOS
from grpo_trainer.not_yet import NOT_YET
from grpo_trainer.objective import LOSS_TYPES, SCALE_REWARDS
from grpo_trainer.rewards import REWARDS
from grpo_trainer.tasks import BUILTIN_TASKS
from tests.contracts.test_imports import FLOORS
from tests.helpers import tiny_llama, tiny_tokenizer
from tests.policy.families import tiny

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("recipes/**/*.md")])
TESTS = sorted(path for path in ROOT.glob("tests/**/*.py") if path != Path(__file__).resolve())

PLACEHOLDER = "TO BE MEASURED"
# Files that may still hold the placeholder. Take a file out once its figures are in; the test then keeps it so.
UNFINISHED: set[str] = set()
HOSTS = {"arxiv.org", "keepachangelog.com", "semver.org"}  # that the docs may name
ENDINGS = r"(?:org|com|io|co|net|ai|dev)"

# --- reading ---------------------------------------------------------------------------------------------------------


def section(path: str, heading: str) -> str:
    """The text of a document under a heading, down to the next one of the same or a higher level."""
    text = (ROOT / path).read_text(encoding="utf-8")
    found = re.search(rf"^(#+) {re.escape(heading)}$", text, re.MULTILINE)
    assert found, f"{path} has no heading {heading!r}"
    rest = text[found.end() :]
    end = re.search(rf"^#{{1,{len(found[1])}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


def tables(text: str) -> list[list[dict[str, str]]]:
    """The tables of a text; each row maps the heads of its columns to its cells."""
    found: list[list[dict[str, str]]] = []
    heads: list[str] = []
    for line in [*text.splitlines(), ""]:
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]
        if not line.startswith("|"):
            heads = []
        elif not heads:
            heads = cells
            found.append([])
        elif not all(set(cell) <= set(":-") for cell in cells):
            assert len(cells) == len(heads), f"a row with {len(cells)} cells under {len(heads)} heads: {line}"
            found[-1].append(dict(zip(heads, cells, strict=True)))
    return found


def rows(path: str, heading: str, head: str) -> dict[str, dict[str, str]]:
    """The rows of the table under a heading whose first column is ``head``, by the code in that column."""
    (table,) = [t for t in tables(section(path, heading)) if t and next(iter(t[0])) == head]
    out: dict[str, dict[str, str]] = {}
    for row in table:
        for name in re.findall(r"`([^`]+)`", row[head]):
            assert name not in out, f"{path}, {heading}: two rows for {name}"
            out[name] = row
    return out


def blocks(path: Path, language: str) -> list[str]:
    """The fenced blocks of a document in a language."""
    text = path.read_text(encoding="utf-8")
    return re.findall(rf"^ *```{language}\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)


def label(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# --- names -----------------------------------------------------------------------------------------------------------

NAMES = {
    "advantages": (ADVANTAGES, "docs/algorithms.md", "Advantages", "name"),
    "policy losses": (POLICY_LOSSES, "docs/algorithms.md", "Policy losses", "name"),
    "kl estimators": (KL_ESTIMATORS, "docs/algorithms.md", "KL estimators", "name"),
    "aggregations": (AGGREGATIONS, "docs/algorithms.md", "Aggregations", "name"),
    "several rewards": (MULTI_REWARD_ADVANTAGES, "docs/algorithms.md", "Advantages of several rewards", "name"),
    "corrections": (CORRECTIONS, "docs/algorithms.md", "Correcting a sampler's mismatch", "name"),
    "ratios": (RATIOS, "docs/algorithms.md", "Importance ratio", "level"),
    "loss types": (LOSS_TYPES, "docs/algorithms.md", "loss_type", "`loss_type`"),
    "scale_rewards": (SCALE_REWARDS, "docs/algorithms.md", "scale_rewards", "`scale_rewards`"),
    "rewards": (REWARDS, "docs/rewards.md", "The library", "name"),
    "tasks and models": (
        [*BUILTIN_TASKS, *(PREFIX + name for name in BUILTIN_MODELS)],
        "docs/quickstart.md",
        "Task and measure",
        "built-in",
    ),
}


@pytest.mark.parametrize("kind", NAMES)
def test_every_name_has_its_row_and_every_row_its_name(kind):
    names, path, heading, head = NAMES[kind]
    assert rows(path, heading, head).keys() == set(names)


@pytest.mark.parametrize("kind", NAMES)
def test_every_name_is_mentioned_in_a_test(kind):
    text = "\n".join(path.read_text(encoding="utf-8") for path in TESTS)
    unmentioned = [n for n in NAMES[kind][0] if not re.search(rf"(?<![\w-]){re.escape(n)}(?![\w-])", text)]
    assert unmentioned == []


@pytest.mark.parametrize("name", LOSS_TYPES)
def test_the_row_of_a_loss_type_says_what_it_stands_for(name):
    row = rows("docs/algorithms.md", "loss_type", "`loss_type`")[name]
    assert (row["policy loss"], row["aggregation"]) == tuple(f"`{part}`" for part in LOSS_TYPES[name])


@pytest.mark.parametrize("name", SCALE_REWARDS)
def test_the_row_of_scale_rewards_says_what_it_stands_for(name):
    row = rows("docs/algorithms.md", "scale_rewards", "`scale_rewards`")[name]
    assert row["advantage"] == f"`{SCALE_REWARDS[name]}`"


WITH_KNOBS = ["advantages", "policy losses", "kl estimators", "aggregations", "several rewards", "corrections"]


@pytest.mark.parametrize("kind", WITH_KNOBS)
def test_knobs_and_their_defaults_are_those_of_the_function(kind):
    table, path, heading, head = NAMES[kind]
    for name, row in rows(path, heading, head).items():
        defaults = table[name].__kwdefaults__ or {}
        said = dict(re.findall(r"`(\w+)=([^`]+)`", row["knobs"]))
        said.pop("beta", None)  # the objective's, not the function's
        assert {k: ast.literal_eval(v) for k, v in said.items()} == defaults, name


def test_the_floors_are_those_that_the_contract_holds():
    (table,) = tables(section("docs/decisions/0001-the-house.md", "Decision"))
    said = {room: int(row["floor"]) for row in table for room in re.findall(r"`(\w+)`", row["rooms"])}
    assert said == {room: floor for room, floor in FLOORS.items() if not room.startswith("__")}


# --- configuration and constructor -----------------------------------------------------------------------------------

STATUSES = {"same", "better", "partly", "not yet"}
MIGRATING = "docs/migrating.md"


def defaults(kind: type) -> dict[str, object]:
    """Field name -> default, for the fields of a dataclass."""
    missing = dataclasses.MISSING
    fields = dataclasses.fields(kind)
    return {f.name: f.default if f.default_factory is missing else f.default_factory() for f in fields}


OURS, THEIRS, BASE = defaults(GRPOConfig), defaults(trl.GRPOConfig), defaults(TrainingArguments)
MOVED = {name for name, value in THEIRS.items() if name not in BASE or value != BASE[name]}


def configuration_tables() -> list[list[dict[str, str]]]:
    return tables(section(MIGRATING, "Configuration"))


def listed(table: list[dict[str, str]]) -> list[str]:
    return [name for row in table for name in re.findall(r"`([^`]+)`", row["field"])]


def test_every_field_of_the_peer_has_one_row():
    peers, _ = configuration_tables()
    assert sorted(listed(peers)) == sorted(MOVED)


def test_every_field_of_our_own_has_one_row():
    _, own = configuration_tables()
    assert {row["field"].strip("`"): ast.literal_eval(row["default"]) for row in own} == {
        name: value for name, value in OURS.items() if name not in BASE and name not in THEIRS
    }


def test_a_status_is_one_of_four():
    peers, _ = configuration_tables()
    assert {row["here"] for row in peers} | set(constructor_statuses().values()) <= STATUSES


def test_a_field_that_is_not_yet_there_is_exactly_one_that_the_configuration_refuses():
    peers, _ = configuration_tables()
    refused = set(NOT_YET)
    assert {name for row in peers if row["here"] == "not yet" for name in listed([row])} == refused


@pytest.mark.parametrize("name", sorted(MOVED))
def test_the_default_is_the_peers(name):
    """Also where a field does more, or is refused: a script that leaves it out runs with the same value."""
    if name == "pad_to_multiple_of" and Version(trl.__version__) < Version("1.16"):
        assert THEIRS[name] is None  # what "auto" means on every machine but one kind
        return
    assert name in OURS
    assert OURS[name] == THEIRS[name]


def constructor_statuses() -> dict[str, str]:
    return {name: row["here"] for name, row in rows(MIGRATING, "Constructor", "argument").items()}


def parameters(function) -> list[str]:
    code = function.__code__
    return list(code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount])


def test_every_argument_of_the_peers_constructor_has_its_row_in_its_order():
    assert list(constructor_statuses()) == parameters(trl.GRPOTrainer.__init__)


def test_our_constructor_takes_the_peers_arguments_in_its_order():
    ours, theirs = parameters(GRPOTrainer.__init__), parameters(trl.GRPOTrainer.__init__)
    assert ours[: len(theirs)] == theirs


# --- metrics ---------------------------------------------------------------------------------------------------------

VARIANTS = {  # what makes the figures that only some settings have
    "cispo": dict(loss_type="cispo"),
    "vespo": dict(loss_type="vespo"),
    "entropy": dict(use_adaptive_entropy=True, off_policy_mask_threshold=0.5),
    "dynamic sampling": dict(dynamic_sampling=True, prompt_sampling="uniform"),
    "workers": dict(reward_options={"reward": {"isolation": "process", "rows_per_call": 8}}),
    "divergence": dict(kl_placement="reward", kl_target=0.1, sampler_correction=True),
    "experts": dict(model=lambda: tiny("qwen3_moe", vocab_size=256)),
}
FROM_TRANSFORMERS = {"loss", "grad_norm", "learning_rate", "epoch", "step", "total_flos", "train_loss"}


def names_of_a_run(folder: Path, model=tiny_llama, **settings) -> set[str]:
    """Every name that a tiny run logs: with a reference, an old policy, an evaluation, a metric of a reward."""

    def reward(completions, log_metric, **kwargs):
        log_metric("letters", sum(map(len, completions)) / len(completions))
        return [float(len(text) % 3) for text in completions]

    common = dict(
        per_device_train_batch_size=16,
        num_generations=8,
        # a random model draws the end-of-sequence id once in 256 tokens, so some of 2 x 16 x 40 end a completion
        max_completion_length=40,
        num_iterations=2,
        beta=0.1,
        max_steps=4,
        logging_steps=2,
        learning_rate=1e-3,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        eval_strategy="steps",
        eval_steps=4,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    data = Dataset.from_list([{"prompt": text} for text in ("one", "two", "three", "four")])
    config = GRPOConfig(str(folder), **{**common, **settings})
    trainer = GRPOTrainer(model(), reward, config, data, data, processing_class=tiny_tokenizer())
    trainer.train()
    names = {name for entry in trainer.state.log_history for name in entry} - FROM_TRANSFORMERS
    return {re.sub(r"(?<=rewards/)reward(?=/)", "<name>", n) for n in names}


@pytest.fixture(scope="module")
def logged(tmp_path_factory) -> set[str]:
    return names_of_a_run(tmp_path_factory.mktemp("run"))


def test_every_figure_of_some_settings_has_its_row_and_every_row_its_figure(logged, tmp_path):
    quick = dict(max_steps=1, logging_steps=1, max_completion_length=4, eval_strategy="no")
    further = {n for s in VARIANTS.values() for n in names_of_a_run(tmp_path, **quick, **s)} - logged
    assert rows("docs/metrics.md", "In training", "figure").keys() == further


def test_every_training_metric_has_its_row_and_every_row_its_metric(logged):
    said = rows("docs/metrics.md", "In training", "metric").keys() - {"<name>", "log_metric"}
    ran = {n for n in logged if not n.startswith(("eval_", "train_"))}
    assert ran - {"letters"} == said
    assert "letters" in ran


def test_every_evaluation_metric_is_named_and_is_one_of_training(logged):
    said = set(re.findall(r"`([\w/<>]+)`", section("docs/metrics.md", "In evaluation").partition("There is no")[0]))
    ran = {n.removeprefix("eval_") for n in logged if n.startswith("eval_")}
    ran -= {"runtime", "samples_per_second", "steps_per_second"}
    training = rows("docs/metrics.md", "In training", "metric").keys()
    assert ran == {n for n in training if n in said or n.startswith("completions/")}
    assert "loss" not in ran


# --- examples --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", DOCS, ids=label)
def test_python_blocks_are_python(path):
    for block in blocks(path, "python"):
        compile(block, label(path), "exec")


@pytest.mark.parametrize("path", DOCS, ids=label)
def test_yaml_blocks_are_recipes(path, tmp_path):
    from grpo_trainer.cli.recipe import load_recipe

    for number, block in enumerate(blocks(path, "yaml")):
        file = tmp_path / f"{number}.yaml"
        file.write_text(block, encoding="utf-8")
        load_recipe(str(file))


@pytest.mark.slow
def test_the_notebook_example_of_the_readme_trains(tmp_path):
    example, *_ = blocks(ROOT / "README.md", "python")
    assert len(example.strip().splitlines()) <= 12
    done = python(example, tmp_path)
    assert "reward" in done.stdout, done.stdout


def test_what_contributing_shows_works(tmp_path):
    """The blocks are one program, from the first to the last."""
    program = "\n".join(blocks(ROOT / "CONTRIBUTING.md", "python"))
    assert program
    python(program, tmp_path)


def python(program: str, folder: Path) -> subprocess.CompletedProcess:
    """Runs a program in a folder, with this checkout's package; it must succeed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def test_the_worked_example_is_the_code():
    import torch

    text = section("docs/algorithms.md", "Advantages")
    for ddof in (1, 0):
        far, near = ADVANTAGES["group_zscore"](torch.tensor([[10.0, 8.0, 3.0, 1.0]]), ddof=ddof)[0, :2].tolist()
        for value in (far, near):
            assert f"+{value:.4f}" in text
            assert f"−{value:.4f}" in text


def test_the_quickstart_is_as_its_page_says():
    import inspect

    from grpo_trainer.cli import heldout, quickstart
    from grpo_trainer.cli.recipe import load_recipe
    from grpo_trainer.tasks import HELDOUT_SUMS, load_task

    config = load_recipe(quickstart.RECIPE, ["--use_cpu"]).config()
    plan = config.batch_plan()
    text = " ".join((ROOT / "docs/quickstart.md").read_text(encoding="utf-8").split())
    train, held_out = load_task("builtin:sums")
    assert (
        f"{config.max_steps} steps of {plan.prompts_per_rollout} prompts × {plan.num_generations} completions" in text
    )
    assert f"learning rate {config.learning_rate:.0e}".replace("e-0", "e-") in text
    assert f"{len(held_out)} questions × {heldout.SAMPLES_PER_PROMPT} samples" in text
    assert f"Of the 400 questions, {HELDOUT_SUMS} are held out" in text
    assert len(train) == 400 - HELDOUT_SUMS
    tree = ast.parse(inspect.getsource(quickstart.summarise))
    (written,) = [n for n in ast.walk(tree) if isinstance(n, ast.Return)]
    keys = rows("docs/quickstart.md", "What it writes", "key of `summary.json`").keys()
    assert keys == {key.value for key in written.value.keys}


def test_the_quickstart_of_functions_is_as_its_page_says():
    from grpo_trainer.cli.quickstart import LESSONS
    from grpo_trainer.cli.recipe import load_recipe
    from grpo_trainer.tasks import load_task

    lesson = LESSONS["code"]
    config = load_recipe(lesson.recipe, ["--use_cpu"]).config()
    plan = config.batch_plan()
    text = " ".join(section("docs/quickstart.md", "Learning to program").split())
    train, held_out = load_task(lesson.dataset)
    assert f"{len(train) + len(held_out)} in all; {len(held_out)} are held out" in text
    assert len(train[0]["tests"]) == 8 and "against eight asserts" in text
    steps = f"{config.max_steps} steps of {plan.prompts_per_rollout} prompts × {plan.num_generations} completions"
    assert steps in text and f"`{config.output_dir}/`" in text


# --- links, paths, commands, words -----------------------------------------------------------------------------------


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("path", DOCS, ids=label)
def test_links_lead_somewhere_in_the_repository(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if re.match(r"https?://", target):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        if there.suffix == ".png" and label(path) in UNFINISHED:
            continue
        assert there.is_relative_to(ROOT), target
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


@pytest.mark.parametrize("path", DOCS, ids=label)
def test_files_that_are_named_exist(path):
    """Whatever stands between backticks and begins with a folder of the repository, also with ``::`` and a test."""
    folders = [p.name for p in ROOT.iterdir() if p.is_dir() and not p.name.startswith(".") and p.name != "out"]
    named = re.findall(rf"`((?:{'|'.join(folders)})/[^`\s]*)`", path.read_text(encoding="utf-8"))
    for name in named:
        file, _, test = name.partition("::")
        assert (ROOT / file).exists(), name
        assert not test or f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), name


@pytest.mark.parametrize("path", DOCS, ids=label)
def test_make_targets_that_are_named_exist(path):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    code = re.findall(r"`([^`]+)`", path.read_text(encoding="utf-8").replace("```", "`"))
    named = {target for text in code for target in re.findall(r"^ *make ([a-z][a-z-]*)", text, re.MULTILINE)}
    assert named <= targets


EVERYWHERE = {"/usr", "/proc", "/etc", "/tmp", "/dev/shm"}
"""Folders that every Linux system has."""


@pytest.mark.parametrize("path", DOCS, ids=label)
def test_no_place_of_one_machine_and_no_other_host_is_named(path):
    text = path.read_text(encoding="utf-8")
    absolute = re.findall(r"""(?:^|[\s`("'])(/[a-z][\w.-]*/?[\w./-]*)""", text)
    assert [found for found in absolute if found.rstrip(".,") not in EVERYWHERE] == []
    upwards = [(path.parent / p).resolve() for p in re.findall(r"(?:\.\./)+[\w./-]*", text)]
    assert all(place.is_relative_to(ROOT) for place in upwards)
    hosts = set(re.findall(rf"\b((?:[\w-]+\.)+{ENDINGS})\b", text))
    assert hosts <= HOSTS


@pytest.mark.parametrize("path", DOCS, ids=label)
def test_figures_are_in_where_a_document_is_finished(path):
    assert label(path) in UNFINISHED or PLACEHOLDER not in path.read_text(encoding="utf-8")


def test_the_readme_leads_to_every_document():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    missing = [label(p) for p in DOCS if p.parent == ROOT / "docs" and f"({label(p)})" not in text]
    assert missing == []
    assert "(docs/decisions" in text
