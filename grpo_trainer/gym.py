"""Tasks of the library reasoning-gym by name, ``reasoning_gym:chain_sum?max_terms=3``, as data sets with two parts.

A row does not carry what the library knows of a problem, which no table could hold without loss, but which problem it
is. The reward ``reasoning_gym`` has the library make it again, and score an answer to it; see ``rewards/gym.py``.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from grpo_trainer.registry import suggest

if TYPE_CHECKING:
    from datasets import Dataset

PREFIX = "reasoning_gym:"
SIZES = {"size": 1000, "test_size": 100}
"""Problems of each part, unless the name says otherwise."""
REFUSED = {"game_of_life_halting": "its scorer gives full marks to any text"}
"""Tasks that are not offered, each with the reason."""
APART = 1_000_003
"""What the seed of the held-out part is beyond that of the training part."""


def load_gym_task(name: str, seed: int = 0) -> tuple[Dataset, Dataset]:
    """The two parts of a task.

    Args:
        name: ``reasoning_gym:TASK``, with parameters after a ``?``, as in an address: ``size`` and ``test_size``, how
            many problems; ``level``, by how many steps each attribute of the task's curriculum is raised above the
            lowest; and any field of the task's configuration.
        seed: of the problems.

    Returns:
        ``(train, heldout)``: a ``prompt`` (one user message), the ``answer`` as text or None where the task has no
        single one, and ``problem``, which one it is. A problem of one part may be the same as one of the other where a
        task has few.

    Raises:
        ValueError: if the task or a parameter is unknown, or a value is not legal.
        ImportError: if the library is not installed.

    Example:
        >>> parse("reasoning_gym:chain_sum?max_terms=3&size=10")
        ('chain_sum', {'max_terms': 3, 'size': 10})
    """
    from datasets import Dataset

    task, given = parse(name)
    size, heldout = (_count(name, given.pop(key, default), key) for key, default in SIZES.items())
    config = _configuration(name, task, given)
    parts = []
    for count, own in ((size, seed), (heldout, seed + APART)):
        made = {"task": task, "config": config, "seed": own, "size": count}
        problems = make(json.dumps(made))
        rows = []
        for index in range(count):
            entry = problems[index]
            rows.append(
                {
                    "prompt": [{"role": "user", "content": entry["question"]}],
                    "answer": None if entry["answer"] is None else str(entry["answer"]),
                    "problem": json.dumps({**made, "index": index}),
                }
            )
        parts.append(Dataset.from_list(rows))
    return parts[0], parts[1]


def parse(name: str) -> tuple[str, dict[str, Any]]:
    """A name in its parts.

    Args:
        name: as for ``load_gym_task``.

    Returns:
        The task, and its parameters; a value that is a number, a truth value or a list in JSON is one.
    """
    task, _, query = name.removeprefix(PREFIX).partition("?")
    return task, {key: _value(text) for key, text in parse_qsl(query, keep_blank_values=True)}


def make(problems: str) -> Any:
    """The library's own object for some problems.

    Args:
        problems: ``task``, ``config``, ``seed`` and ``size``, as JSON.

    Returns:
        It; an index gives a problem, ``score_answer`` a score from 0 to 1.

    Raises:
        ImportError: if the library is not installed.
    """
    library, made = _library(), json.loads(problems)
    return library.create_dataset(made["task"], seed=made["seed"], size=made["size"], **made["config"])


def _library() -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ImportError(
            "tasks of reasoning-gym need the library: pip install 'grpo-trainer[rewards]', or pip install reasoning-gym"
        ) from error
    return reasoning_gym


def _configuration(name: str, task: str, given: dict[str, Any]) -> dict[str, Any]:
    """The fields of the task's configuration that are not as the library has them."""
    _library()
    from reasoning_gym.factory import DATASETS, create_curriculum, has_curriculum

    if task in REFUSED:
        raise ValueError(f"{name!r}: this task is not offered: {REFUSED[task]}")
    if task not in DATASETS:
        raise ValueError(f"{name!r}: reasoning-gym has no task {task!r}.{suggest(task, DATASETS)}")
    config: dict[str, Any] = {}
    level = given.pop("level", None)
    if level is not None:
        if not has_curriculum(task):
            raise ValueError(f"{name!r}: the task {task!r} has no curriculum, so no level can be set")
        if isinstance(level, bool) or not isinstance(level, int) or level < 0:
            raise ValueError(f"{name!r}: level is {level!r}; give a whole number, 0 or more")
        curriculum = create_curriculum(task)
        for attribute, spec in curriculum.attributes.items():
            curriculum.set_attr_level(attribute, min(level, len(spec.levels) - 1))
        raised = curriculum.generate_configuration({})
        config = {k: v for k, v in vars(raised).items() if k not in ("seed", "size")}
    known = DATASETS[task][1].__dataclass_fields__
    for key in given:
        if key not in known or key == "seed":
            legal = [k for k in known if k != "seed"] + ["test_size", "level"]
            raise ValueError(f"{name!r}: the task {task!r} has no parameter {key!r}.{suggest(key, legal)}")
    config.update(given)
    try:
        DATASETS[task][1](**config).validate()
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"{name!r}: {error or 'these parameters do not fit together'}") from error
    return config


def _count(name: str, value: Any, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name!r}: {what} is {value!r}; give a whole number, 1 or more")
    return value


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
