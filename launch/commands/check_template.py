"""``tandem check-template``: whether Tandem can continue a model's chat template, and where it rewrites earlier turns."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.errors import ConfigError
from configs.reading.yaml_values import read_yaml
from launch.checks.arguments import BadInput
from launch.tables import aligned

if TYPE_CHECKING:
    from rollout.environments.rendering import ChatRenderer
    from rollout.environments.template_probes import Probe


def check_template(model_dir: Path, *, with_tools: bool, arguments: Sequence[str]) -> bool:
    """Print how Tandem handles the template. Returns whether the template can be used; if not, the error is printed.

    Args:
        with_tools: also as for an environment with tools, which needs messages of role ``tool``.
        arguments: KEY=VALUE of the template; values are YAML.

    Raises:
        BadInput: the folder does not exist, or an argument is not of this form.
    """
    given = dict(map(_argument, arguments))
    if not model_dir.is_dir():
        raise BadInput(f"MODEL: {model_dir} is not a folder; name a Hugging Face folder on this disk")
    from rollout.tokenization import end_token_ids, import_transformers_without_torch, load_tokenizer

    import_transformers_without_torch()
    from rollout.environments.rendering import ChatRenderer
    from rollout.environments.template_probes import EXAMPLE_TOOL, probe_template

    try:
        tokenizer = load_tokenizer(model_dir)
        renderer = ChatRenderer(tokenizer, tools=[EXAMPLE_TOOL] if with_tools else [], arguments=given)
        stop_ids = end_token_ids(tokenizer, model_dir)
        probes = probe_template(renderer)
    except ValueError as error:
        print(f"tandem: {error}", file=sys.stderr)
        return False
    _print_probes(probes)
    _print_ends(renderer, stop_ids)
    for note in renderer.notes:
        print(f"note: {note}")
    print("Tandem can use this template: every prompt begins with the tokens that were sampled before it")
    return True


def _argument(given: str) -> tuple[str, Any]:
    name, equals, value = given.partition("=")
    if not (name and equals):
        raise BadInput(f"--argument {given}: write KEY=VALUE, such as enable_thinking=false")
    try:
        read = read_yaml(value, "command line", name)
    except ConfigError as error:
        fix = "put quotes around it"
        raise BadInput(f"--argument {given}: {value!r} is not a value of YAML; {fix}") from error
    return name, read and read.plain()


def _print_probes(probes: "Sequence[Probe]") -> None:
    """A table of all probes, and below it each way in which they differ, with its first example."""
    words = {True: "yes", False: "no", None: "cannot be compared"}
    rows = [(probe.name, words[probe.is_equal]) for probe in probes]
    print(*aligned([("conversation", "whole rendering = what Tandem appends"), *rows]), "", sep="\n")
    for meaning in dict.fromkeys(probe.meaning for probe in probes if probe.meaning):
        alike = [probe for probe in probes if probe.meaning == meaning]
        print(f"{', '.join(probe.name for probe in alike)}:\n  {meaning}")
        first = alike[0]
        if first.first_difference is not None:
            print(f"  first at token {first.first_difference} of {first.name!r}, in [[ ]]:")
            print(f"    Tandem    {first.ours!r}\n    template  {first.theirs!r}")
        print()


def _print_ends(renderer: "ChatRenderer", stop_ids: Sequence[int]) -> None:
    def named(ids: Sequence[int]) -> str:
        return ", ".join(f"{renderer.decode([number])!r} ({number})" for number in ids)

    print(f"end of the assistant's turn: {named(renderer.end_token_ids)}")
    if missing := [number for number in renderer.end_token_ids if number not in stop_ids]:
        print(
            f"warning: the model does not stop at {named(missing)}, but at {named(stop_ids)}: environments stop there, but a "
            "single turn would continue; add the id to eos_token_id in generation_config.json"
        )
