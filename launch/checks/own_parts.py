"""Tries a user's objective, advantage, weight and order of the prompts before anything starts, in separate processes: this
process imports no torch, and must not hang."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import cache

from configs.loader import Finding
from configs.schema import RunConfig
from configs.schema.own_function import OwnFunction
from rollout.rewards.trial_process import TrialProcess

LOSS, ORDER = "trainer.own_contract", "rollout.sampling.order"
"""Modules whose ``serve`` tries a function."""
START_TIMEOUT_S = 120.0
"""Time for the process to start and import torch."""


def check_own_parts(
    config: RunConfig, tell: Callable[[str], None], first_row: Callable[[], Mapping | None] = lambda: None
) -> Iterator[Finding]:
    """What is wrong with the functions. ``tell`` is called while a trial takes long. ``first_row``: the first record of the
    training data, if there is one."""
    chosen = {
        "objective": config.policy_objective,
        "advantage": config.advantage,
        "correction.weight": config.correction.weight,
        "sampler": config.sampler,
    }
    with ExitStack() as processes:

        @cache
        def process_of(module: str) -> TrialProcess:
            """One process for all functions that the module tries: a second one would import torch again."""
            process = processes.enter_context(TrialProcess(module, tell=tell))
            starting, fix = "starting the trial of the user's functions", "try again on a quieter machine"
            process.reply(starting, "its limit", START_TIMEOUT_S, fix)
            return process

        for field, own in chosen.items():
            if not isinstance(own, OwnFunction) or own.check == "none":
                continue
            key = field, own.model_dump_json()
            if key not in _PROBLEMS:
                row = first_row() if field == "sampler" else None
                try:
                    _PROBLEMS[key] = _try(field.rpartition(".")[2], own, row, process_of)
                except ValueError as error:  # of a process that is late or gone
                    _PROBLEMS[key] = str(error)
                    processes.close()
                    process_of.cache_clear()
            if error := _PROBLEMS[key]:
                yield f"{field}.function", f"{field}.function: {error}"


_PROBLEMS: dict[tuple[str, str], str | None] = {}
"""Results of past trials: a study of layouts loads its config once per layout."""


def _try(
    part: str, own: OwnFunction, row: Mapping | None, process_of: Callable[[str], TrialProcess]
) -> str | None:
    module = own.function.partition(":")[0]
    limit = "check_timeout_s", own.check_timeout_s
    fields = own.model_dump(include=set(OwnFunction.model_fields))
    serves, job = (ORDER, (fields, row)) if part == "sampler" else (LOSS, (part, fields))
    process = process_of(serves)
    fix = "do slow work in the function's first call, or raise its check_timeout_s"
    error = process.ask(("import", *job), f"importing {module}", *limit, fix)
    if error is None and own.check == "call":
        fix = "make it faster, or raise its check_timeout_s"
        error = process.ask(("call", *job), f"trying {own.function} on made data", *limit, fix)
    return error
