"""Checks before a start: whether SGLang serves a model with these settings, and takes these flags."""

import difflib
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from configs.schema.model import ModelConfig
from configs.schema.rollout import RolloutConfig
from rollout.servers.command import ATTENTION_OF_FLOAT32, has_recurrent_layers, sglang_sources
from rollout.servers.share import ServerShare

LONGEST_FOLDER_OF_SOCKETS = 95
"""Bytes of a folder's path. Linux takes 107 for a socket's path, and SGLang's names take 12 of them (``/tmp`` and eight
characters of ``tempfile``)."""
OWNED_FLAGS = frozenset({
    "model", "model-path", "config", "device", "base-gpu-id", "gpu-id-step", "host", "port", "nccl-port",
    "dist-init-addr", "nccl-init-addr", "nnodes", "node-rank", "tp-size", "tensor-parallel-size", "pp-size",
    "pipeline-parallel-size", "dp-size", "data-parallel-size", "dtype", "max-total-tokens", "random-seed",
    "weight-version", "skip-tokenizer-init", "enable-fp32-lm-head", "quantization", "load-format",
    "rl-quant-profile", "enable-memory-saver", "enable-return-routed-experts", "api-key", "admin-api-key",
})  # fmt: skip
"""Flags, with all their names, that the schema's fields or the design determine. ``server_args`` may not set
them."""
FP8_MODELS = ("qwen2", "qwen3")
"""Model types whose loader in SGLang 0.5.23 can load new weights into FP8 weights (its
``supports_quantized_rl_reload``)."""


def check_temporary_folder() -> None:
    """Raise ValueError if paths in this machine's folder for temporary files are too long for sockets."""
    folder = tempfile.gettempdir()
    length = len(os.fsencode(folder))
    if length > LONGEST_FOLDER_OF_SOCKETS:
        error = f"TMPDIR={folder} has {length} characters, too many for the paths of the sockets that SGLang puts into it"
        raise ValueError(f"{error}; set TMPDIR to a folder with at most {LONGEST_FOLDER_OF_SOCKETS}")


def check_server_args(config: RolloutConfig) -> None:
    """Refuse flags in ``server_args`` that other fields or the design determine. Raises ValueError: a name
    has dashes in front, or is or abbreviates one of ``OWNED_FLAGS``."""
    for name in config.server_args:
        flag = name.replace("_", "-")
        # SGLang also accepts the beginning of a flag.
        owned = next((owned for owned in sorted(OWNED_FLAGS) if owned.startswith(flag)), None)
        if flag.startswith("-") or owned:
            short = f": it is short for {owned}" if owned and owned != flag else ""
            raise ValueError(
                f"rollout.server_args: {name!r} cannot be set there{short}; write names without dashes in front, and set the model, ports, "
                "dtype, quantization, sizes and seed by their own config fields"
            )


def check_flags_exist(config: RolloutConfig) -> None:
    """Refuse flags in ``server_args`` that SGLang's sources do not declare by their full names. Raises
    ValueError: SGLang has no such flag."""
    sglang_flags = flags_of_sglang() if config.server_args else ()
    for name in config.server_args:
        flag = name.replace("_", "-")
        if sglang_flags and flag.removeprefix("no-") not in sglang_flags:
            close = difflib.get_close_matches(flag, sglang_flags, n=1)
            listing = "`python -m sglang.launch_server --help` lists them"
            fix = f"did you mean {close[0]!r}?" if close else listing
            raise ValueError(f"rollout.server_args: SGLang has no flag {name!r}; {fix}")


def flags_of_sglang() -> list[str]:
    """The flags that SGLang's sources declare, and a few settings without a flag. An import would take seconds.

    A flag is a field, ``model_path: A[...]``, or a text, ``"--model"``, which is an alias or a separate argument.
    Empty if SGLang is not installed, or its sources have another form.
    """
    home = sglang_sources()
    sources = (home / "arg_groups" / "fields").glob("*.py")
    fields = "".join(file.read_text(encoding="utf-8") for file in sources)
    if not fields:
        return []
    text = fields + (home / "server_args.py").read_text(encoding="utf-8")
    names = {*re.findall(r"^    (\w+): A\[", fields, re.MULTILINE), *re.findall(r'"--([\w-]+)"', text)}
    return sorted(name.replace("_", "-") for name in names)


def check_quantization(config: RolloutConfig, model_type: str) -> None:
    """Refuse FP8 for a model whose loader in SGLang cannot take new weights. Raises ValueError."""
    if config.quantization == "fp8" and model_type not in FP8_MODELS:
        raise ValueError(
            f"rollout.quantization=fp8: SGLang cannot update a {model_type} model while it serves it in FP8, only models of type "
            f"{' and '.join(FP8_MODELS)}; set rollout.quantization=none"
        )


def check_numerics_device(model: ModelConfig, *, cuda: bool) -> None:
    """Refuse aligned numerics on CUDA, where they were never tested. Raises ValueError."""
    if model.numerics == "aligned" and cuda:
        raise ValueError(
            "model.numerics=aligned works only with CPU kernels, and this run is for GPUs; set model.numerics=default"
        )


def check_has_kernels(config: RolloutConfig, *, cuda: bool) -> None:
    """Refuse FP8 on CPU, where SGLang has no kernels for it. Raises ValueError."""
    if config.quantization == "fp8" and not cuda:
        raise ValueError(
            "rollout.quantization=fp8 needs NVIDIA GPUs, because SGLang has FP8 kernels only for them; set rollout.quantization=none. "
            "rollout.precision rounds only the weights, on any device"
        )


def check_samples_by_seed(config: RolloutConfig, *, cuda: bool) -> None:
    """Refuse SGLang's deterministic mode on CPU: none of its attention backends runs there. Raises ValueError."""
    if config.server_flags.get("enable-deterministic-inference", False) is not False and not cuda:
        raise ValueError(
            "rollout.server_args.enable-deterministic-inference needs NVIDIA GPUs, because the attention backends of this mode run only "
            "there; remove it"
        )


def check_windows_are_served(
    config: RolloutConfig, model_type: str, windows: Sequence[int | None], *, cuda: bool
) -> None:
    """Refuse SGLang 0.5.23's Triton attention for windows. For each token that it samples, it leaves out the oldest token of
    the window (its pull request 32087); a prefill does not. A tiny Olmo 3 was 0.7 to 1.3 nats off on an H200.

    windows: one per layer; empty: no layer has one. Raises ValueError.
    """
    named = config.server_flags
    backend = named.get("attention-backend", ATTENTION_OF_FLOAT32 if config.dtype == "float32" else None)
    if cuda and any(windows) and named.get("decode-attention-backend", backend) == "triton":
        raise ValueError(
            f"SGLang's Triton attention leaves out the oldest token of a window for each token that it samples, and this "
            f"{model_type} has windows; set rollout.dtype=bfloat16, and remove rollout.server_args.attention_backend or set another one"
        )


def check_dtype_is_served(config: RolloutConfig, model: Path, *, cuda: bool) -> None:
    """Refuse float32 on GPUs for gated delta nets, whose kernels in SGLang compute only in 16-bit types. Raises ValueError."""
    if cuda and config.dtype == "float32" and has_recurrent_layers(model):
        raise ValueError(
            "rollout.dtype=float32: SGLang's GPU kernels of gated delta nets compute only in 16-bit types; set "
            "rollout.dtype=bfloat16 (and model.dtype, for the smallest gap)"
        )


def check_gpus(config: RolloutConfig, first_gpu: int, available: int) -> None:
    """Refuse a config that needs more GPUs than ``available``: one per learner rank and rank of a replica.
    Raises ValueError: with both numbers and the fix."""
    needed = first_gpu + config.replicas * config.tp
    if available < needed:
        raise ValueError(
            f"{needed} GPUs are needed, {first_gpu} for the learner or other servers and rollout.replicas={config.replicas} times "
            f"rollout.tp={config.tp} for the servers, but {available} are visible here; use fewer learner ranks "
            "(layout) or fewer or smaller replicas (rollout), or make more visible (CUDA_VISIBLE_DEVICES)"
        )


def check_gpus_of(shares: Sequence[ServerShare], *, available: int) -> None:
    """Refuse shares that take more GPUs of this node than ``available``. Raises ValueError."""
    needed = max((share.first_gpu + share.num_ranks for share in shares), default=0)
    if available < needed:
        raise ValueError(
            f"the servers of this node take GPUs {min(share.first_gpu for share in shares)} to {needed - 1}, but {available} are visible "
            "here; use fewer learner ranks (layout) or fewer or smaller replicas (rollout), or make more visible (CUDA_VISIBLE_DEVICES)"
        )
