"""The names at the Hugging Face hub of the models that recipes expect in folders under ``models/``. A folder's name does not say
its owner, and an error is to have a command to paste."""

_BY_OWNER = {
    "Qwen": (
        "Qwen2.5-0.5B-Instruct",
        "Qwen2.5-1.5B-Instruct",
        "Qwen2.5-3B-Instruct",
        "Qwen2.5-7B-Instruct",
        "Qwen2.5-14B-Instruct",
        "Qwen2.5-32B",
        "Qwen2.5-72B-Instruct",
        "Qwen3-0.6B",
        "Qwen3-4B",
        "Qwen3-8B",
        "Qwen3-14B",
        "Qwen3-32B",
        "Qwen3-30B-A3B",
        "Qwen3-235B-A22B",
    ),
    "meta-llama": ("Llama-3.1-8B-Instruct", "Llama-3.1-70B-Instruct"),
}

HUB_NAMES = {name: f"{owner}/{name}" for owner, names in _BY_OWNER.items() for name in names}
"""Folder's name -> OWNER/NAME."""
