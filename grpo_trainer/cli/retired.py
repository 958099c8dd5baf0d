"""Settings of older TRL, transformers and open-r1 recipes: what each became, in one table.

A retired setting is renamed, becomes an environment variable, or is left out because it changes nothing, each with a
note; or it is refused with what to write instead. None is passed over in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo_trainer.cli.errors import RecipeError

Convert = Callable[[Any], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Retired:
    """What became of a setting.

    Attributes:
        became: name of the setting, or of the environment variable, that takes its place.
        convert: value -> the settings that take its place; raises ValueError with the remedy if it cannot be carried
            over. None hands the value on to ``became`` as it is.
        note: the end of the sentence ``"<name> <note>"``.
        variable: whether ``became`` is an environment variable.
    """

    note: str
    became: str | None = None
    convert: Convert | None = None
    variable: bool = False


@dataclass(frozen=True, kw_only=True)
class Translation:
    """A setting in the words of today.

    Attributes:
        settings: name -> value.
        environment: variable -> value.
        note: a sentence about it, empty for a setting of today.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    note: str = ""


def translate(key: str, value: Any, where: str) -> Translation:
    """What a retired setting is today.

    Args:
        key: a name in ``RETIRED``.
        value: what it was set to.
        where: where it comes from, for the note and the error.

    Returns:
        The settings and variables that take its place, with a note.

    Raises:
        RecipeError: if nothing does, with what to write instead.

    Example:
        >>> translate("torch_dtype", "bfloat16", "my.yaml").settings
        {'dtype': 'bfloat16'}
    """
    entry = RETIRED[key]
    note = f"{where}: {key} {entry.note}"
    if entry.variable:
        return Translation(environment={str(entry.became): value} if value is not None else {}, note=note)
    if entry.convert is None:
        return Translation(settings={entry.became: value} if entry.became else {}, note=note)
    try:
        return Translation(settings=entry.convert(value), note=note)
    except ValueError as error:
        raise RecipeError(f"{where}: {key}: {value!r} {error}") from error


def _renamed(became: str, convert: Convert | None = None, note: str = "") -> Retired:
    return Retired(became=became, convert=convert, note=note or f"is now called {became}")


def _variable(name: str) -> Retired:
    return Retired(became=name, variable=True, note=f"is now the environment variable {name}, which is set to it")


def _left_out(why: str, *harmless: Any, otherwise: str = "") -> Retired:
    """Left out with a note; if ``harmless`` lists values, any other one is refused with ``otherwise``."""

    def check(value: Any) -> dict[str, Any]:
        if harmless and value not in (None, *harmless):
            raise ValueError(otherwise)
        return {}

    return Retired(note=f"is left out: {why}", convert=check)


def _refused(remedy: str) -> Retired:
    def refuse(value: Any) -> dict[str, Any]:
        raise ValueError(f"cannot be honoured: {remedy}")

    return Retired(note="is refused", convert=refuse)


def _one_configuration(value: Any) -> dict[str, Any]:
    names = value if isinstance(value, list) else [value]
    if len(names) != 1:
        raise ValueError("names several configurations: list them under datasets, each with path and name")
    return {"dataset_config": names[0]}


def _share_of_steps(value: Any) -> dict[str, Any]:
    try:
        share = float(value)
    except (TypeError, ValueError):
        share = -1.0
    if not 0 <= share < 1:
        raise ValueError("must be a share in [0, 1); for a number of steps set warmup_steps")
    return {"warmup_steps": share}


def _mixture(value: Any) -> dict[str, Any]:
    """open-r1's ``dataset_mixture`` in TRL's words."""
    if not isinstance(value, Mapping) or not isinstance(value.get("datasets"), list):
        raise ValueError("must be a mapping with a list `datasets`; write datasets and test_split_size instead")
    unknown = set(value) - {"datasets", "seed", "test_split_size"}
    if unknown:
        raise ValueError(f"has {', '.join(sorted(map(str, unknown)))}, which nothing here knows; leave it out")
    names = {"id": "path", "config": "name"}
    entries = [{names.get(k, k): v for k, v in e.items()} if isinstance(e, Mapping) else e for e in value["datasets"]]
    settings = {"datasets": entries, "test_split_size": value.get("test_split_size"), "data_seed": value.get("seed")}
    return {name: given for name, given in settings.items() if given is not None}


def _callbacks(value: Any) -> dict[str, Any]:
    others = [name for name in value or [] if name != "push_to_hub_revision"] if not isinstance(value, str) else [value]
    if others:
        raise ValueError("cannot be honoured: give callbacks to GRPOTrainer in Python, and leave this out")
    return {}


_GONE = "transformers 5 has no such setting, and a run is the same without it"
_LAUNCHER = (
    "it is the launcher's: accelerate launch --config_file FILE --num_processes N -m grpo_trainer train …; "
    "`grpo-trainer list` shows the files that come with the package"
)
_KNOB = "it is an argument of a reward: write reward_funcs: [{name: <reward>, kwargs: {<argument>: <value>}}]"
_VLLM = "it said how older versions of TRL placed and started vLLM"

RETIRED: dict[str, Retired] = {
    # --- TRL ----------------------------------------------------------------------------------------------------------
    "torch_dtype": _renamed("dtype"),
    "dataset_config_name": _renamed("dataset_config"),
    "dataset_train_name": _renamed("dataset_train_split"),
    "dataset_test_name": _renamed("dataset_test_split"),
    "streaming": _renamed("dataset_streaming"),
    "wandb_log_unique_prompts": _renamed("log_unique_prompts"),
    "vllm_guided_decoding_regex": _renamed("vllm_structured_outputs_regex"),
    "vllm_max_model_len": _renamed("vllm_max_model_length"),
    "gradient_checkpointing_use_reentrant": _renamed(
        "gradient_checkpointing_kwargs",
        lambda value: {"gradient_checkpointing_kwargs": {"use_reentrant": value}},
        "is now gradient_checkpointing_kwargs: {use_reentrant: …}",
    ),
    "ref_model_init_kwargs": _refused("the reference is the policy as it was handed in, so leave it out"),
    "use_liger_loss": _left_out("it saved memory in TRL's loss and did not change its value"),
    "vllm_device": _left_out(_VLLM),
    "vllm_dtype": _left_out(_VLLM),
    "vllm_enable_prefix_caching": _left_out(_VLLM),
    "vllm_trust_remote_code": _left_out("trust_remote_code says it for everything that is loaded"),
    "ignore_bias_buffers": _left_out("TRL's script for GRPO does not read it either"),
    # --- open-r1 ------------------------------------------------------------------------------------------------------
    "dataset_configs": _renamed("dataset_config", _one_configuration),
    "dataset_mixture": _renamed("datasets", _mixture, "is now datasets, test_split_size and data_seed"),
    "tokenizer_name": _renamed("tokenizer_name_or_path"),
    "hub_model_revision": _renamed("hub_revision"),
    "wandb_project": _variable("WANDB_PROJECT"),
    "wandb_entity": _variable("WANDB_ENTITY"),
    "wandb_run_group": _variable("WANDB_RUN_GROUP"),
    "benchmarks": _left_out("no benchmarks are run after training; eval_strategy evaluates on held-out prompts"),
    "callbacks": Retired(
        note="is left out: with push_to_hub, hub_strategy says when checkpoints are uploaded", convert=_callbacks
    ),
    "overwrite_hub_revision": _left_out("uploads always go on top of what is there"),
    "push_to_hub_revision": _left_out(
        "nothing is to be uploaded", False, otherwise="has another name: set push_to_hub: true and hub_revision"
    ),
    "remote_gen_model_url": _refused("use_vllm, vllm_mode: server and vllm_server_base_url took its place"),
    **dict.fromkeys(
        [
            *("cosine_min_value_wrong", "cosine_max_value_wrong", "cosine_min_value_correct"),
            *("cosine_max_value_correct", "cosine_max_len", "repetition_n_grams", "repetition_max_penalty"),
            *("code_language", "code_provider", "code_eval_test_batch_size", "code_eval_scoring_mode"),
            *("parallel_code_exec_per_proc", "e2b_router_url", "morph_router_url", "ioi_provider"),
            *("max_completion_len", "soft_punish_cache"),
        ],
        _refused(_KNOB),
    ),
    # --- transformers -------------------------------------------------------------------------------------------------
    "evaluation_strategy": _renamed("eval_strategy"),
    "per_gpu_train_batch_size": _renamed("per_device_train_batch_size"),
    "per_gpu_eval_batch_size": _renamed("per_device_eval_batch_size"),
    "no_cuda": _renamed("use_cpu"),
    "warmup_ratio": _renamed("warmup_steps", _share_of_steps, "is now warmup_steps, which below 1 is a share"),
    "push_to_hub_model_id": _renamed("hub_model_id"),
    "push_to_hub_token": _renamed("hub_token"),
    "include_tokens_per_second": _renamed("include_num_input_tokens_seen"),
    "xpu_backend": _renamed("ddp_backend"),
    "logging_dir": _variable("TENSORBOARD_LOGGING_DIR"),
    "overwrite_output_dir": _left_out(
        "nothing in output_dir is removed, and resume_from_checkpoint says whether a run goes on"
    ),
    "save_safetensors": _left_out(
        "weights are always saved as safetensors", True, otherwise="is not possible: weights are saved as safetensors"
    ),
    "group_by_length": _left_out("rows are dealt out by rollout"),
    "include_inputs_for_metrics": _left_out("an evaluation computes rewards only"),
    **dict.fromkeys(
        [
            *("dispatch_batches", "split_batches", "fp16_backend", "fp16_opt_level", "half_precision_backend"),
            *("jit_mode_eval", "mp_parameters", "past_index", "ray_scope", "tpu_metrics_debug", "tpu_num_cores"),
            *("use_ipex", "use_legacy_prediction_loop", "use_mps_device"),
        ],
        _left_out(_GONE),
    ),
    "push_to_hub_organization": _refused("write it into hub_model_id: organization/name"),
    "fsdp_min_num_params": _refused("write it into fsdp_config"),
    "fsdp_transformer_layer_cls_to_wrap": _refused("write it into fsdp_config"),
    # --- the launcher -------------------------------------------------------------------------------------------------
    "mixed_precision": _refused("set bf16: true or fp16: true"),
    **dict.fromkeys(
        [
            *("accelerate_config", "config_file", "distributed_type", "gpu_ids", "machine_rank"),
            *("main_process_ip", "main_process_port", "multi_gpu", "num_machines"),
        ],
        _refused(_LAUNCHER),
    ),
}
"""Every retired setting by its name."""
