"""What Tandem appends to sampled turns, compared with the chat template's rendering of the whole conversation.

They differ if the template rewrites earlier turns. Tandem keeps what was sampled. A server that renders all messages
again does not: its prompt no longer begins with the tokens that the policy has seen and sampled.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rollout.environments.rendering import QUESTION, ChatRenderer, Message

SYSTEM: Message = {"role": "system", "content": "Be brief."}
USER: list[Message] = [{"role": "user", "content": "Are you sure?"}]
TOOL: list[Message] = [{"role": "tool", "content": "4", "tool_call_id": "call00001", "name": "probe"}]
TWO_TOOLS: list[Message] = [*TOOL, {**TOOL[0], "content": "5", "tool_call_id": "call00002"}]
EXAMPLE_TOOL = {
    "type": "function",
    "function": {
        "name": "tandem_probe",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
            "required": ["a", "b"],
        },
    },
}
THINKING = "<think>\nTwo and two.\n</think>\n\nFour."
AROUND = 4
"""Tokens that are shown on either side of a difference."""

DROPS_THINKING = (
    "the template drops the thinking of earlier turns: a server that renders them again would fork here; Tandem keeps "
    "what was sampled"
)
TRIMS = "the template trims an answer: a server that renders it again would fork here; Tandem keeps what was sampled"
REWRITES = "the template rewrites earlier answers; Tandem keeps what was sampled"
OTHER_HEADER = (
    "the template opens an earlier turn of the assistant with another text than its generation prompt; Tandem keeps "
    "the prompt that the policy saw"
)
OTHER_TOKENS = (
    "the text is the same, but an answer gets other tokens if it is tokenised with the text before it; "
    "Tandem keeps the tokens that were sampled"
)
REWRITES_OTHERS = (
    "the template changes earlier messages once later ones follow; Tandem keeps them as they were"
)
AFTER_SYSTEM = (
    "with a system message, the template writes another text after a turn; Tandem appends the text that it writes "
    "without one"
)
TAKES_NO_SYSTEM = "the template does not take system messages, so a system prompt is refused"
NEEDS_CALLS = "the template takes tools' replies only after tool_calls, so there is nothing to compare"


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A short conversation, and whether both renderings have the same tokens."""

    name: str
    is_equal: bool | None
    """None: the template cannot render it as a whole."""
    meaning: str = ""
    first_difference: int | None = None
    """Position of the first token that differs."""
    ours: str = ""
    """Text around it, as Tandem has it; the token that differs is between ``[[`` and ``]]``."""
    theirs: str = ""


Rounds = Sequence[tuple[str, Sequence[Message]]]
PROBES: dict[str, Rounds] = {
    "user reply": [("Four.", USER)],
    "user replies twice": [("Four.", USER), ("Yes.", USER)],
    "tool reply": [("Let me see.", TOOL)],
    "two tools at once": [("Let me see.", TWO_TOOLS)],
    "tool replies twice": [("Let me see.", TOOL), ("Once more.", TOOL)],
    "thinking in an earlier turn": [(THINKING, USER)],
    "thinking before a tool reply": [(THINKING, TOOL)],
    "empty answer": [("", USER)],
    "answer with trailing blank": [("Four. \n", USER)],
    "user reply, system message": [("Four.", USER)],
}
STARTS: dict[str, list[Message]] = {"user reply, system message": [SYSTEM, QUESTION]}
"""Messages before the first answer, if they are more than a question."""


def probe_template(renderer: ChatRenderer) -> list[Probe]:
    """Every probe whose roles the template takes."""
    return [
        _compare(renderer, name, rounds)
        for name, rounds in PROBES.items()
        if all(str(message["role"]) in renderer.replies for _, replies in rounds for message in replies)
    ]


def _compare(renderer: ChatRenderer, name: str, rounds: Rounds) -> Probe:
    if any(renderer.needs_tool_calls(replies) for _, replies in rounds):
        return Probe(name=name, is_equal=None, meaning=NEEDS_CALLS)
    start = STARTS.get(name, [QUESTION])
    conversation = list(start)
    try:
        ours = renderer.opening(conversation)
    except ValueError:  # every renderer takes a question alone
        return Probe(name=name, is_equal=None, meaning=TAKES_NO_SYSTEM)
    for answer, replies in rounds:
        ours += renderer.encode(answer) + renderer.following(replies, sampled_end=False)
        conversation += [{"role": "assistant", "content": answer}, *replies]
    try:
        text = renderer.render(conversation, header=True)
    except ValueError as error:
        return Probe(name=name, is_equal=None, meaning=str(error))
    theirs = renderer.encode(text)
    if ours == theirs:
        return Probe(name=name, is_equal=True)
    pairs = zip(ours, theirs, strict=False)
    shorter = min(len(ours), len(theirs))
    first = next((i for i, (own, other) in enumerate(pairs) if own != other), shorter)
    return Probe(
        name=name,
        is_equal=False,
        meaning=OTHER_TOKENS
        if renderer.decode(ours) == text
        else _meaning(renderer, text, start, rounds[0][0]),
        first_difference=first,
        ours=_around(renderer, ours, first),
        theirs=_around(renderer, theirs, first),
    )


def _meaning(renderer: ChatRenderer, text: str, start: Sequence[Message], answer: str) -> str:
    """What a whole rendering that differs does to the first answer."""
    opened = renderer.render(start, header=True)
    if "</think>" in answer and "Two and two." not in text:
        return DROPS_THINKING
    if answer not in text and answer.strip() in text:
        return TRIMS
    if not text.startswith(renderer.render(start, header=False)):
        return REWRITES_OTHERS
    kept = opened + answer + renderer.decode(renderer.end_token_ids[:1])
    if not text.startswith(kept):
        return OTHER_HEADER
    return AFTER_SYSTEM if SYSTEM in start else REWRITES


def _around(renderer: ChatRenderer, ids: Sequence[int], position: int) -> str:
    before, after = ids[max(position - AROUND, 0) : position], ids[position + 1 : position + 1 + AROUND]
    return f"{renderer.decode(before)}[[{renderer.decode(ids[position : position + 1])}]]{renderer.decode(after)}"
