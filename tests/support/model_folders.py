"""Hugging Face folders that pass every check before a start, of any size, in milliseconds: config.json as
given, real headers, no weights.

The safetensors file is sparse: its header names every tensor of the model, and the bytes that they would have
are a hole.
"""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parallel.planning.architecture import read_architecture
from parallel.planning.families import SUPPORTED
from parallel.weights.hf_names import hf_shapes

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHARACTERS = "0123456789+-*()=: "


def make_model_folder(folder: Path, hf_config: Mapping[str, Any], *, tokens: int = 24) -> Path:
    """A folder of this config.json; ``tokens`` are those of its tokenizer. Of an unsupported model the
    weights are an empty file."""
    folder.mkdir(parents=True)
    served = {"architectures": [f"{str(hf_config.get('model_type')).removesuffix('_text')}ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(served | {**hf_config}))
    if hf_config.get("model_type") in SUPPORTED:
        write_weights(folder / "model.safetensors", hf_shapes(read_architecture(hf_config)))
    else:
        (folder / "model.safetensors").touch()
    write_tokenizer(folder, tokens=tokens)
    return folder


def write_weights(path: Path, shapes: Mapping[str, tuple[int, ...]], *, dtype: str = "BF16") -> None:
    """A sparse safetensors file of tensors of these shapes."""
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = 2
        for length in shape:
            size *= length
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)


def write_tokenizer(folder: Path, *, tokens: int = 24, chat_template: str | None = CHATML) -> None:
    """A character a token, as in ``rollout/tiny_model.py``; the unknown token stands for every other
    character."""
    names = ["<eos>", "<pad>", "<unk>", *CHARACTERS]
    names += [f"<unused_{i}>" for i in range(tokens - len(names))]
    content = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [
            {"id": i, "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
            for i, name in enumerate(names[:3])
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False},
        "post_processor": None, "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": {name: i for i, name in enumerate(names)}, "unk_token": "<unk>"},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(content))
    options = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
    }
    options |= {} if chat_template is None else {"chat_template": chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
