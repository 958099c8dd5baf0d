"""What a recipe says beside the trainer's own configuration: model, adapter, data, rewards."""

from __future__ import annotations

import typing
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class RewardEntry:
    """One reward of a recipe.

    Attributes:
        name: a registered name, or ``pkg.mod:fn``.
        weight: its weight in the sum.
        kwargs: keyword arguments that are bound to it.
        isolation: where it is called: ``inline``, ``process`` or ``sandbox``. Here and below, ``declared`` leaves it as
            the function declares.
        time_limit: seconds of a call in a worker; null for no limit.
        memory_limit: bytes of address space of a worker; null for no limit.
        rows_per_call: completions per call; null for all.
        on_error: what an exception or a crash means: ``raise``, ``none``, or the reward to give instead.
        on_timeout: what it means that the time limit ran out.
        group: call it once per group.
        cache: score equal completions once.
    """

    __pydantic_config__: typing.ClassVar[dict[str, str]] = {"extra": "forbid"}

    name: str
    weight: float = 1.0
    kwargs: dict[str, Any] = field(default_factory=dict)
    isolation: Literal["inline", "process", "sandbox", "declared"] = "declared"
    time_limit: float | Literal["declared"] | None = "declared"
    memory_limit: int | Literal["declared"] | None = "declared"
    rows_per_call: int | Literal["declared"] | None = "declared"
    on_error: float | Literal["raise", "none", "declared"] = "declared"
    on_timeout: float | Literal["raise", "none", "declared"] = "declared"
    group: bool | Literal["declared"] = "declared"
    cache: bool | Literal["declared"] = "declared"

    def options(self) -> dict[str, Any]:
        """How it is run, where the recipe says so."""
        names = ("isolation", "time_limit", "memory_limit", "rows_per_call", "on_error", "on_timeout", "group", "cache")
        return {name: getattr(self, name) for name in names if getattr(self, name) != "declared"}


@dataclass(frozen=True, kw_only=True)
class DatasetEntry:
    """One dataset of a mixture. Names are TRL's, but for the last three.

    Attributes:
        path: as ``dataset_name`` of a recipe.
        name: name of a configuration of the dataset.
        data_dir: folder in the dataset, or of the files that a loader such as ``json`` reads.
        data_files: files of the dataset, or those that a loader reads.
        split: split to use, also part of one: ``train[:100]``.
        columns: columns to keep, after they are renamed; None keeps all.
        fraction: share of this dataset in the mixture; given for all or for none. The mixture is as large as it can be
            without using a row twice.
        weight: share of its own rows that is used, drawn by the seed.
        column_mapping: column -> its new name.
        map_fn: ``pkg.mod:fn``, as ``dataset_map_fn`` of a recipe.
    """

    __pydantic_config__: typing.ClassVar[dict[str, str]] = {"extra": "forbid"}

    path: str | list[str]
    name: str | None = None
    data_dir: str | None = None
    data_files: str | list[str] | dict[str, str | list[str]] | None = None
    split: str = "train"
    columns: list[str] | None = None
    fraction: float | None = None
    weight: float | None = None
    column_mapping: dict[str, str] | None = None
    map_fn: str | None = None


@dataclass(frozen=True, kw_only=True)
class RecipeArguments:
    """What a recipe says beside the trainer's own configuration. Names are TRL's and open-r1's.

    Attributes:
        model_name_or_path: a folder, a name on the model hub, or ``builtin:smollm2-135m-instruct``.
        model_revision: branch, tag or commit on the hub.
        tokenizer_name_or_path: where the tokenizer comes from; None takes the model's.
        chat_template: a Jinja template, or the path of a file that holds one; None takes the tokenizer's.
        dtype: type of the weights, e.g. ``bfloat16``; None leaves it to the trainer.
        attn_implementation: e.g. ``sdpa``; None leaves it to the trainer.
        use_peft: train a LoRA adapter and leave the model as it is.
        lora_r: rank of the adapter.
        lora_alpha: scale of the adapter, over its rank.
        lora_dropout: dropout of the adapter.
        lora_target_modules: names of the modules that get one; None takes peft's choice for the architecture.
        lora_target_parameters: names of parameters that get one, for experts that are no modules.
        lora_modules_to_save: modules that are trained whole beside the adapter.
        lora_task_type: must be ``CAUSAL_LM``.
        use_rslora: scale the adapter by alpha over the square root of its rank.
        use_dora: train the magnitude of each weight apart from its direction.
        load_in_4bit: load the model in 4 bits; needs an adapter.
        load_in_8bit: load the model in 8 bits; needs an adapter.
        bnb_4bit_quant_type: ``nf4`` or ``fp4``.
        bnb_4bit_quant_storage: type in which 4-bit blocks are stored; None takes that of bitsandbytes.
        use_bnb_nested_quant: quantise the constants of the 4-bit blocks too.
        dataset_name: ``builtin:sums``, a file (.jsonl, .json, .csv, .parquet), a pattern of files, a list of files, a
            folder, or a name on the hub.
        dataset_config: name of a configuration of the dataset.
        dataset_train_split: split to train on, also part of one: ``train[:100]``.
        dataset_test_split: split to evaluate on, used if ``eval_strategy`` is not ``no``.
        dataset_streaming: read rows as they are needed; needs ``max_steps``.
        datasets: several datasets, one after the other, in place of ``dataset_name``.
        test_split_size: hold out so many rows, or such a share of them, for evaluation, by the seed.
        dataset_map_fn: ``pkg.mod:fn``, called with each row; what it returns is added to the row.
        dataset_column_mapping: column -> its new name.
        dataset_prompt_column: column that holds the prompt.
        system_prompt: put before each prompt, which thereby becomes a conversation.
        reward_funcs: one reward or several, each a name, ``pkg.mod:fn``, or a mapping of name, weight,
            kwargs, and how it is run.
        reward_model_name_or_path: a reward model, which comes before ``reward_funcs``.
        num_processes: the processes that the recipe is made for; another number is refused.
        env: environment variables, set before any library is loaded; those that are set already win.
        provenance: what a saved run says about itself, for people to read; it changes nothing.
    """

    model_name_or_path: str | None = None
    model_revision: str | None = None
    tokenizer_name_or_path: str | None = None
    chat_template: str | None = None
    dtype: str | None = None
    attn_implementation: str | None = None
    use_peft: bool = False
    lora_r: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.05
    lora_target_modules: str | list[str] | None = None
    lora_target_parameters: str | list[str] | None = None
    lora_modules_to_save: list[str] | None = None
    lora_task_type: Literal["CAUSAL_LM"] = "CAUSAL_LM"
    use_rslora: bool = False
    use_dora: bool = False
    load_in_4bit: bool = False
    load_in_8bit: bool = False
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = "nf4"
    bnb_4bit_quant_storage: str | None = None
    use_bnb_nested_quant: bool = False
    dataset_name: str | list[str] | None = None
    dataset_config: str | None = None
    dataset_train_split: str = "train"
    dataset_test_split: str = "test"
    dataset_streaming: bool = False
    datasets: list[DatasetEntry] | None = None
    test_split_size: int | float | None = None
    dataset_map_fn: str | None = None
    dataset_column_mapping: dict[str, str] | None = None
    dataset_prompt_column: str = "prompt"
    system_prompt: str | None = None
    reward_funcs: str | RewardEntry | list[str | RewardEntry] | None = None
    reward_model_name_or_path: str | None = None
    num_processes: int | None = None
    env: dict[str, str | int | float | bool] | None = None
    provenance: dict[str, Any] | None = None

    def rewards(self) -> list[RewardEntry]:
        """The reward functions, each in its long form."""
        given = self.reward_funcs
        entries = given if isinstance(given, list) else [] if given is None else [given]
        return [RewardEntry(name=e) if isinstance(e, str) else e for e in entries]

    def weights(self) -> list[float]:
        """The weight of each reward, that of a reward model first."""
        model = [1.0] if self.reward_model_name_or_path else []
        return [*model, *(entry.weight for entry in self.rewards())]

    @property
    def data_name(self) -> str:
        """What the data are called in a message."""
        if self.datasets:
            return f"a mixture of {len(self.datasets)} datasets"
        name = self.dataset_name
        return name if isinstance(name, str) else f"{len(name)} files" if name else "no dataset"
