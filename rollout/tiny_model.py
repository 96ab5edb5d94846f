"""A tiny model of a supported family with a real tokenizer, trainable on two CPU cores in minutes."""

import json
import os
import shutil
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from rollout.tasks.countdown import CHARACTERS

# SGLang's models with experts never share the embedding's weight with the output layer.
_EXPERTS = {"num_experts_per_tok": 2, "tie_word_embeddings": False}
_GROUPED = _EXPERTS | {
    "intermediate_size": 384, "moe_intermediate_size": 96, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5, "num_nextn_predict_layers": 0,
}  # fmt: skip
_LATENT = _GROUPED | {
    "num_key_value_heads": 4, "head_dim": 16, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
}  # fmt: skip
_RECURRENT = {
    "full_attention_interval": 2,  # which SGLang reads
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
}  # fmt: skip
_SECTIONS = {
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}  # fmt: skip
_SHARED_EXPERT = _EXPERTS | {
    "num_experts": 8, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 96,
}  # fmt: skip
_DENSE = {"intermediate_size": 384, "tie_word_embeddings": True}
FAMILIES = {
    "qwen3": _DENSE,
    "qwen3_moe": _EXPERTS | {
        "intermediate_size": 384, "moe_intermediate_size": 96, "num_experts": 8, "norm_topk_prob": True,
    },
    "mixtral": _EXPERTS | {"intermediate_size": 96, "num_local_experts": 8},
    "glm4_moe": _GROUPED | {"use_qk_norm": True, "attention_bias": True},
    "deepseek_v2": _LATENT | {
        "q_lora_rank": None, "n_group": 1, "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax", "moe_layer_freq": 1,
    },
    "deepseek_v3": _LATENT | {
        "q_lora_rank": 48, "n_group": 4, "topk_group": 2,
        # Published folders have these beside the fields of transformers' class, and SGLang reads them.
        "topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1,
    },
    "glm4_moe_lite": _LATENT | {"q_lora_rank": 48, "rms_norm_eps": 1e-6},
    "qwen3_next": _RECURRENT | _SHARED_EXPERT | {"intermediate_size": 384, "norm_topk_prob": True},
    "qwen3_5_text": _DENSE | _RECURRENT | _SECTIONS,
    "qwen3_5_moe_text": _RECURRENT | _SHARED_EXPERT | _SECTIONS,
    "qwen2": _DENSE,
    "llama": _DENSE,
    "mistral": _DENSE | {"sliding_window": None},
    "phi3": _DENSE | {"tie_word_embeddings": False},
    "olmo2": _DENSE,
    "olmo3": _DENSE | {
        "sliding_window": 16,
        # As published: three layers of four have a window, and YaRN rotates the fourth.
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn", "rope_theta": 500_000.0, "factor": 4.0, "original_max_position_embeddings": 64,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 500_000.0},
        },
    },
    "gpt_oss": _EXPERTS | {
        "intermediate_size": 96, "num_local_experts": 8, "sliding_window": 16,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150_000.0, "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0,
            "beta_slow": 1.0, "truncate": False,
        },
    },
    "glm4": _DENSE | {"attention_bias": True},
    "gemma3_text": _DENSE | {
        "sliding_window": 16, "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "query_pre_attn_scalar": 24,
        # As in models of 4 billion parameters and more.
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    },
}  # fmt: skip
"""By transformers' ``model_type``: the fields of the config that are specific to the family."""

BYTE_LEVEL = ("qwen2", "qwen3_5_moe_text")
"""Families whose tokenizer transformers opens as its own byte-level one, whatever the folder says. That one writes the
space as another character."""
SPECIAL_TOKENS = ("<eos>", "<pad>", "<unk>")
VOCAB_MULTIPLE = 8
"""The vocabulary is padded to a multiple of this, so that it splits evenly over tensor-parallel ranks."""


def make_tiny_countdown_model(
    folder: Path, *, seed: int, family: str = "qwen3", initializer_range: float = 0.02
) -> None:
    """Write a Hugging Face folder of a randomly initialised model (float32) for the Countdown task.

    ``family`` is one of ``FAMILIES``. Dense ones have 0.8 M parameters. Those with experts have 8 in every layer (GLM and
    DeepSeek not in the first), and 1.4 M parameters, of which a token uses 0.5 M. The folder appears under its name only
    when complete. The same ``seed`` gives the same weights. ``initializer_range`` is their standard deviation. From about
    0.1 on, the untrained model's answers depend on the prompt.

    Raises ValueError: ``folder`` exists already, or ``family`` is unknown.
    """
    if family not in FAMILIES:
        raise ValueError(f"family {family!r} is unknown; use one of {', '.join(FAMILIES)}")
    folder = Path(folder)
    if folder.exists():
        raise ValueError(f"{folder} exists already; remove it or choose another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    try:
        tokenizer = _character_tokenizer(of_bytes=family in BYTE_LEVEL)
        tokenizer.save_pretrained(partial)
        _random_model(tokenizer, seed, family, initializer_range).save_pretrained(partial)
        if family == "olmo3":
            write_olmo3_rope(partial)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_olmo3_rope(folder: Path) -> None:
    """Give a saved Olmo 3 the rope fields of the published files, which SGLang reads, instead of transformers' own."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    full = config.pop("rope_parameters")["full_attention"]
    theta = full.pop("rope_theta")
    scaling = full if full["rope_type"] != "default" else None
    path.write_text(json.dumps(config | {"rope_theta": theta, "rope_scaling": scaling}, indent=2))


def _character_tokenizer(*, of_bytes: bool) -> PreTrainedTokenizerFast:
    """One token per character. Unknown characters become <unk>, which shows them; transformers' own class drops them."""
    tokens = [*SPECIAL_TOKENS, *CHARACTERS]
    # Padding tokens are ordinary tokens: if the model samples one, its text spoils the answer, as it should.
    tokens += [f"<unused_{i}>" for i in range(-len(tokens) % VOCAB_MULTIPLE)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    each = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    if of_bytes:
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        written = {
            byte_level.pre_tokenize_str(character)[0][0] if len(character) == 1 else character: i
            for character, i in vocabulary.items()
        }
        tokenizer = Tokenizer(models.BPE(written, merges=[], unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([each, byte_level])
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        tokenizer.pre_tokenizer = each
        tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )


def _random_model(
    tokenizer: PreTrainedTokenizerFast, seed: int, family: str, initializer_range: float
) -> PreTrainedModel:
    own = FAMILIES[family]
    config = AutoConfig.for_model(
        family,
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        **({"num_key_value_heads": 2, "head_dim": 32} | own),
        max_position_embeddings=256,
        initializer_range=initializer_range,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):  # leaves the caller's random state as it was
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).to(torch.float32)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # zero would hide that it was lost
                buffer.normal_(std=0.02)
        if "linear_num_value_heads" in own or family == "gemma3_text":
            # transformers leaves it at zero, where three norms in a row multiply a gradient by 1e9.
            table: torch.Tensor = model.get_input_embeddings().weight
            row = SPECIAL_TOKENS.index("<pad>")
            torch.nn.init.normal_(table[row], std=initializer_range)
        if family == "gpt_oss":
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    torch.nn.init.normal_(parameter, std=0.02)
        return model
