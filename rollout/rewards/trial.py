"""A trial of the user's reward function before a run starts: import, and calls on two made-up responses.

    this process: try_function ── trial_process.py ──> a worker (worker.py)

A made-up response can be unlike anything that a function expects. So an exception on one of the two is only a
remark; on both it is an error. A hang, a dead process or a result that is not a reward is always an error.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from configs.schema.reward import FunctionReward
from rollout.rewards import worker
from rollout.rewards.trial_process import TrialProcess
from rollout.rewards.worker import Job

if TYPE_CHECKING:
    from rollout.tasks.task import Problem


def try_function(
    reward: FunctionReward, problem: "Problem | None", tell: Callable[[str], None]
) -> tuple[str, ...]:
    """Remarks on a usable function. ``tell`` is called while the trial takes long. Without a problem the function is
    only imported. Raises ValueError: the function cannot be used; with the fix."""
    key = (reward, problem and (problem.text, problem.reference, repr(problem.row)))
    if key not in _REMARKS:
        with TrialProcess(worker.__name__, reward.function, tell=tell) as process:
            _REMARKS[key] = _try(reward, process, problem)
    return _REMARKS[key]


_REMARKS: dict[tuple, tuple[str, ...]] = {}
"""Results of past trials: a study of layouts loads its config once per layout."""


def _try(reward: FunctionReward, process: TrialProcess, problem: "Problem | None") -> tuple[str, ...]:
    module = reward.function.partition(":")[0]
    fix = "do slow work in the function's first call, or raise its import_timeout_s"
    kind, content = process.reply(f"importing {module}", "import_timeout_s", reward.import_timeout_s, fix)
    if kind != "ready":
        raise ValueError(content)
    if problem is None:
        return ()
    failures = []
    # The right answer, in forms that graders look for.
    ordinary = f"The answer is \\boxed{{{problem.reference}}}.\n#### {problem.reference}"
    for name, response in (("an ordinary response", ordinary), ("an empty response", "")):
        job = Job(
            prompt_text=problem.text,
            response_text=response,
            reference=problem.reference,
            row=problem.row,
            num_tokens=len(response) + 1,
        )
        doing, fix = f"scoring {name}", "make it faster, or raise its timeout_s"
        kind, content = process.ask(job, doing, "timeout_s", reward.timeout_s, fix)
        if kind == "unusable":
            fix = "return a finite number, float(...), or (number, {name: number}), from every path through the function"
            raise ValueError(f"{doing} to the task's first problem: {content}; {fix}")
        if kind == "raised":
            failures.append(f"{doing} to the task's first problem raised {content}")
    if len(failures) > 1:
        fix = (
            "return a number for any response of a model, or set its `check: import`, which does not call it"
        )
        raise ValueError(f"{', and '.join(failures)}; {fix}")
    return tuple(f"{text}: in a run such a response is not scored, and counts as failed" for text in failures)
