"""Fields of TRL 1.16's ``GRPOConfig`` that nothing here honours yet.

They exist so that a script made for TRL gets a clear word: left at TRL's default they do nothing, any other value is
refused rather than ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from transformers import TrainingArguments


def _not_yet(default: Any, what: str) -> Any:
    # nothing but help: HfArgumentParser hands all metadata to argparse
    return field(default=default, metadata={"help": f"{_PREFIX}{what}."})


_PREFIX = "Not supported yet: "


@dataclass
class NotYet(TrainingArguments):
    """The fields, each with TRL's default and what it would be about."""

    ds3_gather_for_generation: bool = _not_yet(True, "generation without gathering ZeRO-3's weights")
    pad_to_multiple_of: int | str | None = _not_yet(
        "auto", "padding to a multiple; rows are padded to the longest of their micro-batch"
    )
    use_vllm: bool = _not_yet(False, "vLLM; leave it out, and completions are drawn by the policy itself")
    vllm_mode: str = _not_yet("colocate", "vLLM")
    vllm_model_impl: str = _not_yet("vllm", "vLLM")
    vllm_enable_sleep_mode: bool = _not_yet(False, "vLLM")
    vllm_structured_outputs_regex: str | None = _not_yet(None, "vLLM")
    vllm_server_base_url: str | None = _not_yet(None, "vLLM")
    vllm_server_host: str = _not_yet("0.0.0.0", "vLLM")
    vllm_server_port: int = _not_yet(8000, "vLLM")
    vllm_server_timeout: float = _not_yet(240.0, "vLLM")
    vllm_group_port: int = _not_yet(51216, "vLLM")
    vllm_gpu_memory_utilization: float = _not_yet(0.3, "vLLM")
    vllm_max_model_length: int | None = _not_yet(None, "vLLM")
    vllm_tensor_parallel_size: int = _not_yet(1, "vLLM")
    max_tool_calling_iterations: int | None = _not_yet(None, "tools")

    def refuse_not_yet(self) -> None:
        """Refuses what is not supported yet.

        Raises:
            ValueError: if a field has another value than TRL's default.
        """
        for f in fields(NotYet):
            value, what = getattr(self, f.name), f.metadata.get("help", "").removeprefix(_PREFIX).rstrip(".")
            if f.name in NOT_YET and value != f.default:
                raise ValueError(
                    f"{f.name}={value!r} is not supported yet ({what}); leave it at {f.default!r}. "
                    "docs/migrating.md lists what is."
                )


NOT_YET = frozenset(f.name for f in fields(NotYet)) - frozenset(f.name for f in fields(TrainingArguments))
"""The names."""
