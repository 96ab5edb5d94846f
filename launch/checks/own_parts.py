"""Tries a user's objective, advantage and weight before anything starts, in a process of their own: this one imports
no torch, and cannot hang."""

from collections.abc import Callable, Iterator

from configs.loader import Finding
from configs.schema import RunConfig
from configs.schema.own_function import OwnFunction
from rollout.rewards.trial_process import TrialProcess

SERVES = "trainer.own_contract"
START_TIMEOUT_S = 120.0
"""Time for the process to start and import torch."""


def check_own_parts(config: RunConfig, tell: Callable[[str], None]) -> Iterator[Finding]:
    """What is wrong with the functions. ``tell`` is called while a trial takes long."""
    chosen = {
        "objective": config.policy_objective,
        "advantage": config.advantage,
        "correction.weight": config.correction.weight,
    }
    for field, own in chosen.items():
        if isinstance(own, OwnFunction) and own.check != "none" and (error := _problem_of(field, own, tell)):
            yield f"{field}.function", f"{field}.function: {error}"


def _problem_of(field: str, own: OwnFunction, tell: Callable[[str], None]) -> str | None:
    key = field, own.model_dump_json()
    if key not in _PROBLEMS:
        try:
            _PROBLEMS[key] = _try(field.rpartition(".")[2], own, tell)
        except ValueError as error:  # of a process that is late or gone
            _PROBLEMS[key] = str(error)
    return _PROBLEMS[key]


_PROBLEMS: dict[tuple[str, str], str | None] = {}
"""Results of past trials: a study of layouts loads its config once per layout."""


def _try(part: str, own: OwnFunction, tell: Callable[[str], None]) -> str | None:
    module = own.function.partition(":")[0]
    limit = "check_timeout_s", own.check_timeout_s
    fields = own.model_dump(include=set(OwnFunction.model_fields))
    with TrialProcess(SERVES, tell=tell) as process:
        process.reply(
            "starting the trial of the user's functions",
            "its limit",
            START_TIMEOUT_S,
            "try again on a quieter machine",
        )
        fix = "do slow work in the function's first call, or raise its check_timeout_s"
        error = process.ask(("import", part, fields), f"importing {module}", *limit, fix)
        if error is None and own.check == "call":
            fix = "make it faster, or raise its check_timeout_s"
            error = process.ask(("call", part, fields), f"trying {own.function} on made batches", *limit, fix)
        return error
