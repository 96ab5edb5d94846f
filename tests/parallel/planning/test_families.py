"""The table of families: the page has it word for word, and its names are those that config.json files have."""

import math
import re
from pathlib import Path

import pytest
from transformers import (
    DeepseekV3Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from configs.schema.layout import LayoutConfig
from parallel.planning.architecture import read_architecture
from parallel.planning.families import REFUSED, SUPPORTED, check_served_class, family_of
from parallel.planning.memory import stage_parameters
from parallel.weights.hf_names import hf_shapes
from rollout.tiny_model import FAMILIES

PAGE = Path(__file__).parents[3] / "docs" / "model.md"
SMALL_GEMMA = {
    "vocab_size": 262_144,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "sliding_window": 512,
}
TEXT_PARTS = {"kimi_k2", "pixtral"}
"""Names of published config.json files that transformers reads by code in the folder, or has under another."""


def tables() -> list[list[list[str]]]:
    """Cells of the page's tables, without their head."""
    found = re.findall(r"(?:^\|.*\n)+", PAGE.read_text(), re.MULTILINE)
    return [
        [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()[2:]]
        for table in found
    ]


def test_the_page_has_every_family_and_its_layers():
    wanted = [[f"`{name}`", family.title, family.layers] for name, family in SUPPORTED.items()]
    assert wanted in tables()


def test_the_page_has_every_refused_family_and_its_reason():
    by_reason: dict[str, list[str]] = {}
    for name, reason in REFUSED.items():
        by_reason.setdefault(reason, []).append(f"`{name}`")
    wanted = [[", ".join(names), reason] for reason, names in by_reason.items()]
    assert wanted in tables()


def test_names_are_those_of_published_models():
    """A misspelt name would never refuse anything."""
    assert not SUPPORTED.keys() & REFUSED.keys()
    known = CONFIG_MAPPING_NAMES.keys()
    assert known >= SUPPORTED.keys() and REFUSED.keys() - known <= TEXT_PARTS


@pytest.mark.parametrize("name", FAMILIES)
def test_the_class_of_a_family_is_what_transformers_saves(name):
    saved = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]
    check_served_class({"architectures": [saved]}, name)
    other = "Qwen2ForCausalLM" if name != "qwen2" else "Qwen3ForCausalLM"
    for wrong in (
        None,
        [],
        [other],
        [saved, other],
        [saved.replace("CausalLM", "SequenceClassification")],
        saved,
    ):
        with pytest.raises(ValueError, match=f"of a {name} model has architectures="):
            check_served_class({"architectures": wrong}, name)


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_family_says_why(name):
    with pytest.raises(ValueError) as error:
        family_of(name)
    assert str(error.value).startswith(
        f"model_type '{name}' is not supported: {REFUSED[name]}; supported are qwen2 ("
    )


@pytest.mark.parametrize("name", ["unheard_of", None, 3, ["qwen3"]])
def test_an_unknown_family_lists_the_supported_ones(name):
    with pytest.raises(ValueError) as error:
        family_of(name)
    assert str(error.value).startswith(f"model_type {name!r} is not supported; supported are")
    assert all(f"{known} (" in str(error.value) for known in SUPPORTED)


def test_every_family_has_a_tiny_model():
    assert FAMILIES.keys() == SUPPORTED.keys()


@pytest.mark.parametrize(
    ("billions", "config"),
    [
        (106, Glm4MoeConfig(head_dim=128, attention_bias=True)),  # GLM-4.5-Air, whose sizes are the class's defaults
        (
            355,  # GLM-4.5
            Glm4MoeConfig(
                head_dim=128, attention_bias=True, hidden_size=5120, intermediate_size=12288, num_hidden_layers=92,
                n_routed_experts=160, moe_intermediate_size=1536, first_k_dense_replace=3, use_qk_norm=True, routed_scaling_factor=2.5,
            ),
        ),
        (671, DeepseekV3Config(topk_method="noaux_tc", scoring_func="sigmoid", moe_layer_freq=1)),  # DeepSeek-V3
        (30, Glm4MoeLiteConfig(first_k_dense_replace=1)),  # GLM-4.7-Flash
        (  # whose sizes are the class's defaults, but for that of unused dense layers
            79.7,
            Qwen3NextConfig(full_attention_interval=4, layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 12),
        ),
        (  # the text model of Qwen3.5-27B
            26.9,
            Qwen3_5TextConfig(
                full_attention_interval=4, layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 16, hidden_size=5120,
                intermediate_size=17408, num_hidden_layers=64, num_attention_heads=24, linear_num_value_heads=48,
            ),
        ),
        (0.268, Gemma3TextConfig(**SMALL_GEMMA, num_hidden_layers=18, hidden_size=640, intermediate_size=2048)),
        (1.0, Gemma3TextConfig(**SMALL_GEMMA, num_hidden_layers=26, hidden_size=1152, intermediate_size=6912)),
        (20.9, GptOssConfig(num_hidden_layers=24, num_local_experts=32)),
        (116.8, GptOssConfig()),
    ],
)  # fmt: skip
def test_models_have_as_many_parameters_as_their_cards_say(billions, config):
    """By the shapes of the folder's tensors, and by the memory model."""
    architecture = read_architecture(config.to_dict())
    shapes = hf_shapes(architecture)
    parameters = sum(map(math.prod, shapes.values()))
    assert parameters == pytest.approx(billions * 1e9, rel=0.02)
    biases = sum(shape[0] for name, shape in shapes.items() if name.endswith("e_score_correction_bias"))
    assert sum(stage_parameters(architecture, LayoutConfig(dp=1), 0)) == parameters - biases
