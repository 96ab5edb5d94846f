"""The gate, on packed tensors that were changed by hand."""

from dataclasses import replace

import pytest

from tests.support import records
from trainer.batch.exact_turns import TurnsDiffer, require_exact_turns
from trainer.batch.plan import pack_trajectories


def trajectory(sibling_id: int):
    """Turns at the places 2 and 3, and at 5. The first token is no target."""
    return records.trajectory(
        group_id=0, sibling_id=sibling_id, prompt_id="p", reward=0.0, reward_parts={}, token_versions=[0] * 6,
        token_ids=[4, 5, 6, 7, 8, 9], rollout_logprobs=[0.0] * 6,
        response_mask=[False, False, True, True, False, True],
    )  # fmt: skip


def changed(both, place: int):
    """Both packed, and another token at a place of the second one."""
    packed = pack_trajectories(both, [0, 1])
    inputs, targets = packed.tokens_T.clone(), packed.targets_T.clone()
    inputs[place + 5 : place + 6], targets[place + 4 : place + 5] = 1, 1
    return packed.with_fields(tokens_T=inputs, targets_T=targets)


@pytest.mark.parametrize(("place", "told"), [
    (1, "turn 1 was sampled from other tokens than the 2 before it"),
    (2, "turn 1 has other tokens than the server answered with"),
    (4, "turn 2 was sampled from other tokens than the 5 before it"),
    (5, "turn 2 has other tokens than the server answered with"),
])  # fmt: skip
def test_a_changed_token_is_named_by_its_turn(place, told):
    both = [trajectory(0), trajectory(1)]
    require_exact_turns(both, pack_trajectories(both, [0, 1]))
    with pytest.raises(TurnsDiffer, match=f"^prompt p, sibling 1: {told}; nothing was trained on$"):
        require_exact_turns(both, changed(both, place))


def test_the_mask_is_that_of_the_turns_or_empty_without_a_score():
    scored = trajectory(0)
    unscored = replace(scored, reward=None)
    packed = pack_trajectories([scored], [0])
    empty = packed.with_fields(response_mask_T=packed.response_mask_T & False)
    require_exact_turns([unscored], empty)
    for one, wrong in ((unscored, packed), (scored, empty)):
        with pytest.raises(
            TurnsDiffer, match="sibling 0: 3 tokens of the response mask are not those of its"
        ):
            require_exact_turns([one], wrong)
