"""The configuration of a run: TRL's names, defaults and meanings, then a few fields of our own."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from grpo_trainer.accumulation import AUTO
from grpo_trainer.data import OVERLONG_PROMPTS
from grpo_trainer.generation.base import ENGINES
from grpo_trainer.objective import SCALE_REWARDS
from grpo_trainer.policy.packing import VERIFY_PACKING
from grpo_trainer.registry import suggest
from grpo_trainer.rewards.options import check_option_names
from grpo_trainer.runtime import cpu_has_fast_bf16
from grpo_trainer.sampler import BatchPlan
from grpo_trainer.selection import Selection


@dataclass
class GRPOConfig(Selection):
    """Everything that ``GRPOTrainer`` can be told, on top of ``transformers.TrainingArguments``.

    Names, defaults and meanings are those of TRL 1.16's ``GRPOConfig``; docs/migrating.md lists where a field does
    more, or is not there. Contradictions are refused when the object is made, before a model is loaded.

    Raises:
        ValueError: if a value is illegal or two contradict each other; the message names the fields, the numbers and
            what would be legal.

    Example:
        >>> config = GRPOConfig("out", per_device_train_batch_size=4, num_generations=3, report_to="none")
        Traceback (most recent call last):
        ...
        ValueError: a rollout holds 4 completions (per_device_train_batch_size=4 x 1 processes x \
steps_per_generation=1), which is not a whole number of groups of num_generations=3. \
Set steps_per_generation=3, or num_generations to one of [2, 4].
    """

    # --- fields of TrainingArguments with another default, as in TRL -------------------------------------------------
    learning_rate: float = field(default=1e-6, metadata={"help": "Initial learning rate of AdamW."})
    logging_steps: float = field(default=10, metadata={"help": "Log every so many optimizer steps."})
    gradient_checkpointing: bool = field(
        default=True, metadata={"help": "Recompute activations in the backward pass: less memory, a fifth slower."}
    )
    bf16: bool | None = field(
        default=None,
        metadata={
            "help": "bf16 autocast over the weights. None: True on an accelerator unless fp16 is set; on a CPU, True "
            "if the CPU multiplies bf16 matrices natively."
        },
    )
    remove_unused_columns: bool | None = field(
        default=False, metadata={"help": "Must be False: reward functions read the other columns of the dataset."}
    )

    # --- model --------------------------------------------------------------------------------------------------------
    model_init_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Arguments of from_pretrained, if the model is given by name."}
    )
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that a model repository brings."})
    disable_dropout: bool = field(default=False, metadata={"help": "Set every dropout of the policy to 0."})
    cast_lm_head_to_fp32: bool = field(
        default=False,
        metadata={"help": "Keep the vocabulary head in float32 and compute it so, outside autocast too."},
    )

    # --- data ---------------------------------------------------------------------------------------------------------
    num_generations: int | None = field(default=8, metadata={"help": "G, completions per prompt; at least 2."})
    num_generations_eval: int | None = field(
        default=None, metadata={"help": "Completions per prompt in evaluation; None takes num_generations."}
    )
    max_completion_length: int | None = field(default=512, metadata={"help": "Most tokens of a completion."})
    shuffle_dataset: bool | None = field(default=True, metadata={"help": "Shuffle the training prompts."})
    generation_batch_size: int | None = field(
        default=None,
        metadata={"help": "Completions per rollout over all processes; excludes steps_per_generation."},
    )
    steps_per_generation: int | None = field(
        default=None,
        metadata={"help": "Micro-batches per rollout; None takes gradient_accumulation_steps."},
    )
    chat_template_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Further arguments of the chat template."}
    )

    # --- sampling -----------------------------------------------------------------------------------------------------
    temperature: float = field(
        default=1.0, metadata={"help": "Divides the logits, when sampling and in every log-prob; above 0."}
    )
    top_p: float = field(default=1.0, metadata={"help": "Nucleus mass of sampling; 1 keeps all."})
    top_k: int = field(default=0, metadata={"help": "Likeliest tokens kept in sampling; 0 keeps all."})
    min_p: float | None = field(default=None, metadata={"help": "Least probability, as a share of the likeliest."})
    repetition_penalty: float = field(default=1.0, metadata={"help": "1 leaves repeated tokens alone."})
    cache_implementation: str | None = field(
        default=None, metadata={"help": "Name of the cache class of transformers' generate."}
    )
    generation_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Further fields of transformers.GenerationConfig; they win over the others."}
    )

    use_transformers_continuous_batching: bool = field(
        default=False, metadata={"help": "The same as generation_engine='continuous_batching'."}
    )
    transformers_continuous_batching_config: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "Fields of ContinuousBatchingConfig, for generation_engine='continuous_batching'."},
    )
    use_transformers_paged: bool = field(
        default=False, metadata={"help": "TRL's older name of use_transformers_continuous_batching."}
    )

    # --- objective ----------------------------------------------------------------------------------------------------
    router_aux_loss_coef: float | None = field(
        default=None,
        metadata={
            "help": "Weight of the load-balancing loss of a mixture of experts; None takes the model's own, 0 leaves "
            "the loss out."
        },
    )
    num_iterations: int = field(default=1, metadata={"help": "mu, passes over each rollout."})
    reward_weights: list[float] | None = field(
        default=None, metadata={"help": "One weight per reward function; None weighs each with 1."}
    )
    mask_truncated_completions: bool = field(
        default=False, metadata={"help": "Leave the tokens of completions cut at the limit out of the loss."}
    )
    sync_ref_model: bool = field(
        default=False,
        metadata={"help": "Let the reference follow the policy, every ref_model_sync_steps optimizer steps."},
    )
    ref_model_mixup_alpha: float = field(
        default=0.6,
        metadata={"help": "Share of the policy in the new reference, in (0, 1]; 1 makes it the policy of then."},
    )
    ref_model_sync_steps: int = field(
        default=512, metadata={"help": "Optimizer steps from one sync of the reference to the next."}
    )

    # --- logging ------------------------------------------------------------------------------------------------------
    log_completions: bool = field(
        default=False,
        metadata={
            "help": "Write all completions to output_dir/completions; at each log print the latest and send them to "
            "W&B or Trackio."
        },
    )
    num_completions_to_print: int | None = field(default=None, metadata={"help": "Rows printed; None prints all."})
    log_unique_prompts: bool = field(
        default=False,
        metadata={"help": "Print and send only the first completion of each prompt; all are written."},
    )
    log_completions_hub_repo: str | None = field(
        default=None, metadata={"help": "Dataset repository on the hub that the written completions are uploaded to."}
    )
    log_multimodal: bool = field(default=True, metadata={"help": "Images in the tables; prompts hold none yet."})

    # --- fields of our own --------------------------------------------------------------------------------------------
    generation_engine: str = field(
        default="auto",
        metadata={
            "help": "What draws completions. " + "; ".join(f"{name}: {what}" for name, what in ENGINES.items()) + "."
        },
    )
    max_cache_tokens: int | None = field(
        default=None,
        metadata={
            "help": "Most tokens, over all rows that are decoded together, that the group engine keeps keys and values "
            "of; None: as many as take the memory of the model's weights, or half of what is free if that is less."
        },
    )
    advantage_ddof: int = field(
        default=1, metadata={"help": "1: sample standard deviation of a group (TRL's convention); 0: the population's."}
    )
    cpu_threads: int | None = field(
        default=None, metadata={"help": "Threads on a CPU; None takes the cores that this process may use."}
    )
    max_tokens_per_microbatch: int | str | None = field(
        default=AUTO,
        metadata={
            "help": "Most tokens that are computed at once in an update, prompts shared: whole groups are packed "
            "together up to it, and the result does not depend on it. auto: as many as per_device_train_batch_size "
            "rows of the greatest length would have; None: per_device_train_batch_size rows, whatever their length."
        },
    )
    verify_packing: str = field(
        default="first_step",
        metadata={
            "help": "When packed rows are compared with padded ones on the model and data of the run: "
            + "; ".join(f"{name}: {what}" for name, what in VERIFY_PACKING.items())
            + "."
        },
    )
    max_prompt_length: int | None = field(
        default=None, metadata={"help": "Most tokens of a prompt, all special tokens included; None sets no limit."}
    )
    overlong_prompts: str = field(
        default="truncate_left",
        metadata={
            "help": "What becomes of a longer prompt: "
            + "; ".join(f"{name}: {what}" for name, what in OVERLONG_PROMPTS.items())
            + "."
        },
    )

    reward_options: dict[str, dict[str, Any]] | str | None = field(
        default=None,
        metadata={
            "help": "How reward functions are run, by their names: isolation (inline, process, sandbox), time_limit, "
            "memory_limit, rows_per_call, on_error, on_timeout, group, cache."
        },
    )

    def __post_init__(self) -> None:
        by_metric = str(getattr(self.lr_scheduler_type, "value", self.lr_scheduler_type)) in (
            "reduce_lr_on_plateau",
            "greedy",
        )
        if (self.load_best_model_at_end or by_metric) and getattr(self, "metric_for_best_model", None) is None:
            self.metric_for_best_model: str | None = "eval_reward"  # there is no eval_loss
        self._check_types()
        self._check_output_dir()
        self._settle_precision()
        self._settle_checkpointing()
        super().__post_init__()
        self.refuse_not_yet()
        self._parse_mappings()
        if isinstance(self.scale_rewards, bool):
            self.scale_rewards = "group" if self.scale_rewards else "none"
        self._check_choices()
        self.check_variant()
        self.check_selection()
        self._check_numbers()
        self._check_parallelism()
        self._settle_batches()

    def _check_types(self) -> None:
        """Numbers are numbers: a text would fail later, somewhere else, and without its name."""
        whole = (
            *("num_generations", "num_generations_eval", "max_completion_length", "top_k", "num_iterations"),
            *(
                "steps_per_generation",
                "generation_batch_size",
                "max_steps",
                "max_prompt_length",
                "ref_model_sync_steps",
                "num_completions_to_print",
            ),
        )
        real = (
            *("temperature", "top_p", "min_p", "repetition_penalty", "beta", "epsilon", "epsilon_high", "delta"),
            "ref_model_mixup_alpha",
        )
        required = (
            *("num_generations", "max_completion_length", "temperature", "beta", "epsilon"),
            *("ref_model_mixup_alpha", "ref_model_sync_steps"),
        )
        for name in (*whole, *real):
            value = getattr(self, name)
            if value is None and name not in required:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ValueError(f"{name}={value!r} must be a number, not {type(value).__name__}")
            if name in whole and not (math.isfinite(value) and value == int(value)):
                raise ValueError(f"{name}={value} must be a whole number")
            if name in whole:
                setattr(self, name, int(value))
        if self.max_steps == 0:
            raise ValueError("max_steps=0 trains nothing; set the number of steps, or -1 to go by num_train_epochs")

    def _check_output_dir(self) -> None:
        """A folder, or room for one: else hours may pass before something is to be written."""
        wanted = Path(self.output_dir or "trainer_output")
        file = next((path for path in (wanted, *wanted.parents) if path.exists() and not path.is_dir()), None)
        if file is not None:
            raise ValueError(f"output_dir={str(wanted)!r} cannot be a folder, since {str(file)!r} is a file")

    def _settle_precision(self) -> None:
        """Picks the device and precision that this machine has, where the user left them open."""
        if not torch.accelerator.is_available():
            self.use_cpu = True
        if self.bf16 is None:
            self.bf16 = not self.fp16 and (cpu_has_fast_bf16() if self.use_cpu else True)

    def _settle_checkpointing(self) -> None:
        """Hands gradient_checkpointing on under the name that newer versions of transformers use."""
        for old in ("gradient_checkpointing", "gradient_checkpointing_kwargs"):
            new = old.replace("gradient", "activation")
            if hasattr(self, new) and getattr(self, new) is None:
                setattr(self, new, getattr(self, old))

    def _settle_engine(self) -> None:
        """TRL's fields about continuous batching choose the engine of that name."""
        asked = self.use_transformers_continuous_batching or self.use_transformers_paged
        if asked and self.generation_engine not in ("auto", "continuous_batching"):
            raise ValueError(
                f"use_transformers_continuous_batching=True and generation_engine={self.generation_engine!r} "
                "contradict each other; leave one of them out"
            )
        if asked:
            self.generation_engine = "continuous_batching"
        if self.transformers_continuous_batching_config and self.generation_engine != "continuous_batching":
            raise ValueError(
                "transformers_continuous_batching_config has nothing to act on. Set "
                "generation_engine='continuous_batching', or leave it out"
            )

    def _parse_mappings(self) -> None:
        for name in (
            "model_init_kwargs",
            "chat_template_kwargs",
            "generation_kwargs",
            "transformers_continuous_batching_config",
            "reward_options",
        ):
            value = getattr(self, name)
            if isinstance(value, str):
                try:
                    value = json.loads(value)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{name}={value!r} is not JSON: {error}") from error
                setattr(self, name, value)
            if value is not None and not isinstance(value, dict):
                raise ValueError(f"{name} must be a mapping, got {type(value).__name__}: {value!r}")

        for name, options in (self.reward_options or {}).items():  # type: ignore[union-attr]
            if not isinstance(options, dict):
                raise ValueError(f"reward_options[{name!r}] is {options!r}; give a mapping from option to value")
            check_option_names(options, f"reward_options[{name!r}]")

    def _check_choices(self) -> None:
        for name, legal in (
            ("scale_rewards", SCALE_REWARDS),
            ("overlong_prompts", OVERLONG_PROMPTS),
            ("generation_engine", ENGINES),
            ("verify_packing", VERIFY_PACKING),
        ):
            value = getattr(self, name)
            if not isinstance(value, str) or value not in legal:
                raise ValueError(f"{name}={value!r} is unknown.{suggest(str(value), legal)} Legal: {', '.join(legal)}.")
        self._settle_engine()
        cache = self.max_cache_tokens
        if cache is not None and (isinstance(cache, bool) or not isinstance(cache, int) or cache < 1):
            raise ValueError(f"max_cache_tokens={cache!r} must be a whole number, 1 or more, or None")
        if cache is not None and cache <= (self.max_completion_length or 1):
            raise ValueError(
                f"max_cache_tokens={cache} has no room for one completion: max_completion_length is "
                f"{self.max_completion_length}, and its prompt comes on top. Raise it, or leave it out"
            )
        if cache is not None and self.generation_engine == "generate":
            raise ValueError(
                f"max_cache_tokens={cache} is about the group engine, and generation_engine is 'generate'. Leave one "
                "of them out"
            )
        limit = self.max_tokens_per_microbatch
        whole = isinstance(limit, int) and not isinstance(limit, bool) and limit >= 1
        if not whole and limit is not None and limit != AUTO:
            raise ValueError(
                f"max_tokens_per_microbatch={limit!r} must be a whole number, 1 or more, or {AUTO!r}, or None"
            )
        if self.max_prompt_length is None and self.overlong_prompts != "truncate_left":
            raise ValueError(
                f"overlong_prompts={self.overlong_prompts!r} has nothing to act on without a limit: set "
                "max_prompt_length, or leave overlong_prompts out"
            )
        if self.remove_unused_columns:
            raise ValueError(
                "remove_unused_columns=True would take the dataset's columns away from the reward functions. "
                "Set remove_unused_columns=False, and drop columns from the dataset itself if you must."
            )
        if self.log_completions_hub_repo is not None and not self.log_completions:
            raise ValueError(
                f"log_completions_hub_repo={self.log_completions_hub_repo!r} has nothing to upload while "
                "log_completions=False: set log_completions=True, or leave log_completions_hub_repo out"
            )
        if self.advantage_ddof not in (0, 1):
            raise ValueError(f"advantage_ddof={self.advantage_ddof} must be 1 (sample) or 0 (population)")

    def _check_numbers(self) -> None:
        ceiling = 1 + (self.epsilon if self.epsilon_high is None else self.epsilon_high)
        rules: list[tuple[str, bool, str]] = [
            ("temperature", self.temperature > 0, "above 0; greedy groups have no spread to learn from"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("top_k", self.top_k >= 0, "0 (off) or a positive number"),
            ("min_p", self.min_p is None or 0 <= self.min_p <= 1, "in [0, 1], or None"),
            ("repetition_penalty", self.repetition_penalty > 0, "above 0; 1 is off"),
            ("beta", self.beta >= 0, "0 or above"),
            ("epsilon", 0 <= self.epsilon < 1, "in [0, 1)"),
            ("epsilon_high", self.epsilon_high is None or self.epsilon_high >= 0, "0 or above, or None"),
            ("delta", self.delta is None or self.delta > ceiling, f"above 1 + epsilon_high = {ceiling}, or None"),
            (
                "max_completion_length",
                self.max_completion_length is not None and self.max_completion_length >= 1,
                "at least 1",
            ),
            (
                "num_generations_eval",
                self.num_generations_eval is None or self.num_generations_eval >= 1,
                "at least 1, or None",
            ),
            ("ref_model_mixup_alpha", 0 < self.ref_model_mixup_alpha <= 1, "in (0, 1]"),
            ("ref_model_sync_steps", self.ref_model_sync_steps >= 1, "at least 1"),
            ("max_prompt_length", self.max_prompt_length is None or self.max_prompt_length >= 1, "at least 1, or None"),
        ]
        for name, legal, rule in rules:
            value = getattr(self, name)
            if not legal or (isinstance(value, float) and not math.isfinite(value)):
                raise ValueError(f"{name}={value} must be {rule}")
        if self.sync_ref_model and not self.beta:
            raise ValueError(
                f"sync_ref_model=True moves the reference, but beta={self.beta} needs none: set beta above 0, or leave "
                "sync_ref_model out"
            )

    def _check_parallelism(self) -> None:
        if self.auto_find_batch_size:
            raise ValueError(
                "auto_find_batch_size=True would change the batch after its groups were laid out. Set it to False and "
                "lower per_device_train_batch_size (raise gradient_accumulation_steps to keep the step as large)."
            )
        parallel = self.parallelism_config
        if parallel is not None and (parallel.cp_enabled or parallel.sp_enabled):
            raise ValueError("parallelism_config with cp_size > 1 or sp_size > 1 is not supported; set both to 1")

    def _settle_batches(self) -> None:
        per_step = self.per_device_train_batch_size * self.world_size
        if (
            self.generation_batch_size is not None
            and self.steps_per_generation is not None
            and self.generation_batch_size != per_step * self.steps_per_generation  # a copy of a settled one has both
        ):
            raise ValueError(
                f"generation_batch_size={self.generation_batch_size} and steps_per_generation="
                f"{self.steps_per_generation} (x {per_step} a step) say different things; give one of them"
            )
        if self.generation_batch_size is not None:
            if self.generation_batch_size < 1 or self.generation_batch_size % per_step:
                fit = max(per_step, round(self.generation_batch_size / per_step) * per_step)
                raise ValueError(
                    f"generation_batch_size={self.generation_batch_size} is not a multiple of {per_step} "
                    f"(per_device_train_batch_size={self.per_device_train_batch_size} x {self.world_size} processes). "
                    f"Set generation_batch_size={fit}."
                )
            self.steps_per_generation = self.generation_batch_size // per_step
        elif self.steps_per_generation is None:
            self.steps_per_generation = self.gradient_accumulation_steps
        plan = self.batch_plan()
        self.generation_batch_size = plan.completions_per_rollout

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values, as they are saved and sent to tracking services: without tokens.

        Returns:
            Field -> value.
        """
        public = copy.copy(self)
        if isinstance(self.model_init_kwargs, dict):  # may hold the hub's token, as the fields for it do
            public.model_init_kwargs = {
                name: f"<{name.upper()}>" if name == "token" or name.endswith("_token") else value
                for name, value in self.model_init_kwargs.items()
            }
        return super(GRPOConfig, public).to_dict()

    def batch_plan(self) -> BatchPlan:
        """The arithmetic of rollouts and micro-batches, checked.

        Returns:
            The plan.

        Raises:
            ValueError: if a rollout is not a whole number of groups.
        """
        return BatchPlan(
            per_device_train_batch_size=self.per_device_train_batch_size,
            world_size=self.world_size,
            steps_per_generation=self.steps_per_generation,  # type: ignore[arg-type]
            gradient_accumulation_steps=self.gradient_accumulation_steps,
            num_iterations=self.num_iterations,
            num_generations=self.num_generations,  # type: ignore[arg-type]
        )
