"""The trial of a user's objective, advantage or weight on made batches, before a run starts. It checks
properties that the loss relies on and that one call cannot show.

    form           one value for each, of the same dtype and device                              (own_parts.call, in a run too)
    finite         at log-ratios of 100, in a group of one, among equal rewards, without response tokens
    same bits      from the same input, since every rank calls for itself; no input is changed
    gradient       of an objective, only to current; an advantage or weight has none
    independence   objective and weight: a sequence has the same values, and gradient, in any batch and order
                   advantage: the order of samples and the numbers of groups do not matter

``serve`` runs it in a separate process (``launch/checks/own_parts.py`` is the other end of its pipe).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from configs.schema.own_function import OwnFunction
from rollout.environments.tandem_worker.failures import describe
from rollout.user_code import serve_trials
from trainer.algorithm.own_parts import (
    ADVANTAGE,
    OBJECTIVE,
    PARTS,
    WEIGHT,
    ContractError,
    Part,
    broken,
    call,
    check_signature,
    load,
    require_weights,
)
from trainer.algorithm.segments import valid_tokens

RELATIVE, ABSOLUTE = 1e-4, 1e-6
"""Equal except for the rounding of float32 in another order."""
FAR = 100.0
"""A log-ratio that does occur, and whose exp is infinite in float32."""
RESPONSES = ((0, 1, 1, 1, 1), (0, 0, 1, 1), (0, 1, 1, 0, 0, 1, 1, 1), (0, 0, 0))
"""Response masks of the made sequences: single turns, two turns, and one without a response."""


def serve(descriptor: int) -> None:
    """Main function of the trial's process."""
    torch.set_num_threads(1)
    serve_trials(descriptor, _attempt)


def _attempt(what: str, name: str, fields: Mapping[str, Any]) -> None:
    """what: "import" or "call". name: the part. fields: of ``OwnFunction``. Raises ValueError if the function
    cannot be used, or does not keep its contract."""
    part, own = PARTS[name], TypeAdapter(OwnFunction).validate_python(fields)
    if what == "import":
        load(part, own.function)
    else:
        check_contract(part, own)


def check_contract(part: Part, own: OwnFunction) -> None:
    """Raises ValueError if the function does not keep its contract."""
    check_signature(part, own)
    {OBJECTIVE.name: _check_objective, ADVANTAGE.name: _check_advantage, WEIGHT.name: _check_weight}[
        part.name
    ](_Trial(part, own))


@dataclass(frozen=True)
class _Trial:
    part: Part
    own: OwnFunction

    def call(self, about: str, *given: Tensor, fix: str = "correct it", **further: Tensor) -> Tensor:
        """The function's result. Raises ValueError if it raises, changes an input or returns another form."""
        inputs = {**dict(zip(self.part.given, given, strict=True)), **further}
        before = {name: x.detach().clone() for name, x in inputs.items()}
        try:
            result, _ = call(
                self.part, self.own, *given, **{name: (lambda x=x: x) for name, x in further.items()}
            )
        except ContractError:
            raise
        except (Exception, SystemExit) as error:  # the user's code may raise anything, or exit()
            raise self.error(f"{about}, it raised {describe(error)}; {fix}") from error
        for name, x in inputs.items():
            if not torch.equal(x.detach(), before[name]):
                raise self.error(
                    f"it changed {name} in place, which others read after it; work on a new tensor (x = x + 1, not x += 1)"
                )
        return result

    def error(self, what: str) -> ValueError:
        return broken(self.part, self.own, what)

    def require_finite(self, about: str, name: str, values: Tensor, fix: str) -> None:
        wrong = (~values.isfinite()).nonzero().flatten()
        if wrong.numel():
            raise self.error(
                f"{about}, {name} must be finite, but is {values[wrong[0]].item():g} at place {int(wrong[0])}; {fix}"
            )

    def require_same_bits(self, name: str, first: Tensor, again: Tensor) -> None:
        if not torch.equal(first, again):
            raise self.error(
                f"two calls with the same input gave different {name}, but every rank calls for itself and must get the same; "
                "leave out random numbers and state between calls"
            )

    def require_no_gradient(self, name: str, values: Tensor) -> None:
        if values.requires_grad:
            raise self.error(f"{name} has a gradient, and must have none; end with .detach()")

    def require_close(self, name: str, expected: Tensor, found: Tensor, why: str) -> None:
        """``expected`` and ``found``: the same places, computed in two ways."""
        if not torch.allclose(expected, found, rtol=RELATIVE, atol=ABSOLUTE):
            gap = (expected - found).abs()
            place = int(gap.argmax())
            raise self.error(
                f"{name} of the same place is {expected[place].item():.6g} and {found[place].item():.6g}: {why}"
            )


# ----------------------------------------------------------------------------------------------- objective


@dataclass(frozen=True)
class _Sequence:
    """One sequence as the loss sees it: zeros off the mask. All [T] of this sequence."""

    current_T: Tensor
    old_T: Tensor
    advantages_T: Tensor
    mask_T: Tensor


def _made_sequences() -> list[_Sequence]:
    generator, sequences = torch.Generator().manual_seed(0), []
    for response in RESPONSES:
        mask_T = torch.tensor(response, dtype=torch.bool)
        old_T = -torch.randn(len(response), generator=generator).abs() - 2.0
        current_T = old_T + 0.5 * torch.randn(len(response), generator=generator).clamp(-2, 2)
        advantages_T = torch.randn(len(response), generator=generator)
        current_T, old_T, advantages_T = (
            torch.where(mask_T, x_T, 0.0) for x_T in (current_T, old_T, advantages_T)
        )
        sequences.append(_Sequence(current_T, old_T, advantages_T, mask_T))
    return sequences


def _losses(trial: _Trial, about: str, sequences: Sequence[_Sequence]) -> tuple[list[Tensor], list[Tensor]]:
    """(losses, gradients to current) of each sequence, from one call."""
    lengths = [len(s.mask_T) for s in sequences]
    leaf_T = torch.cat([s.current_T for s in sequences]).requires_grad_()
    mask_T = torch.cat([s.mask_T for s in sequences])
    loss_T = trial.call(
        about,
        leaf_T.clone(),  # as in the loss: no leaf
        torch.cat([s.old_T for s in sequences]),
        torch.cat([s.advantages_T for s in sequences]),
        mask_T=mask_T,
        cu_seqlens=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
    )
    fix = "bound log-ratios before their exp (to -20 and 20, say), and divide by no count that may be 0"
    trial.require_finite(about, "loss_T", loss_T.detach(), fix)
    gradient_T = torch.zeros_like(leaf_T)
    if mask_T.any():
        _require_gradient_to(trial, loss_T, leaf_T)
        # Weights that differ between sequences, as those of the aggregation do.
        weights_T = torch.cat([torch.arange(1.0, length + 1) for length in lengths])
        try:
            (found_T,) = torch.autograd.grad((loss_T * weights_T * mask_T).sum(), leaf_T)
        except RuntimeError as error:  # of an operation that was changed in place, or has no gradient
            raise trial.error(f"{about}, its gradient raised {describe(error)}; correct it") from error
        trial.require_finite(about, "the gradient to current_logprobs_T", found_T, fix)
        gradient_T = torch.where(mask_T, found_T, 0.0)
    losses_T = torch.where(mask_T, loss_T.detach(), 0.0)
    return list(losses_T.split(lengths)), list(gradient_T.split(lengths))


def _require_gradient_to(trial: _Trial, loss_T: Tensor, leaf_T: Tensor) -> None:
    """Raises ValueError if no gradient flows to current log-probs, or if gradient flows to something else."""
    if not loss_T.requires_grad:
        raise trial.error(
            "loss_T has no gradient to current_logprobs_T, so that nothing would be learned; compute it from current_logprobs_T without "
            ".detach(), .item() or numpy"
        )
    others = [leaf for leaf in _leaves_of(loss_T) if leaf is not leaf_T]
    if others:
        raise trial.error(
            f"loss_T has a gradient to something other than current_logprobs_T, of shape {[*others[0].shape]}, which no optimizer "
            "moves; detach it"
        )


def _leaves_of(tensor: Tensor) -> list[Tensor]:
    """The tensors that would get gradients in a backward pass from ``tensor``."""
    seen, todo, leaves = set(), [tensor.grad_fn], list[Tensor]()
    if tensor.grad_fn is None:
        return [tensor]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)  # of AccumulateGrad
        leaves += [] if leaf is None else [leaf]
        todo += [function for function, _ in node.next_functions]
    return leaves


def _check_objective(trial: _Trial) -> None:
    sequences = _made_sequences()
    losses, gradients = _losses(trial, "on a made batch", sequences)
    again, gradients_again = _losses(trial, "on a made batch", sequences)
    trial.require_same_bits("losses", torch.cat(losses), torch.cat(again))
    trial.require_same_bits("gradients", torch.cat(gradients), torch.cat(gradients_again))
    if not any(gradient_T.any() for gradient_T in gradients):
        raise trial.error("the gradient of loss_T to current_logprobs_T is 0 on every token of a made batch")
    for rows, how in _splits(len(sequences)):
        about = "on sequences without response tokens" if rows == [len(sequences) - 1] else f"on {how}"
        some, some_gradients = _losses(trial, about, [sequences[row] for row in rows])
        why = (
            f"the first is computed with all sequences in one batch, the second with {how}, but a token's loss must not depend on what "
            "else is in its micro-batch; use means and sums over a sequence alone (by cu_seqlens), or settings"
        )
        for row, loss_T, gradient_T in zip(rows, some, some_gradients, strict=True):
            trial.require_close("loss_T", losses[row], loss_T, why)
            trial.require_close("the gradient of loss_T", gradients[row], gradient_T, why)
    for far in (FAR, -FAR):
        first, *others = sequences
        current_T = torch.where(first.mask_T, -0.5 - max(-far, 0.0), 0.0)
        old_T = torch.where(first.mask_T, current_T - far, 0.0)
        for sign in (1.0, -1.0):
            advantages_T = torch.where(first.mask_T, sign, 0.0)
            extreme = _Sequence(current_T, old_T, advantages_T, first.mask_T)
            _losses(trial, f"where log(pi_current / pi_old) is {far:g}", [extreme, *others])


def _splits(count: int) -> Iterator[tuple[list[int], str]]:
    """(sequences, how they differ from the batch of all) of each further call."""
    yield [*range(count)[::-1]], "the same sequences in another order"
    for row in range(count):
        yield [row], "each sequence alone"


# ------------------------------------------------------------------------------------------ advantage


def _check_advantage(trial: _Trial) -> None:
    generator = torch.Generator().manual_seed(0)
    # Groups of four, three and one, with members anywhere; one group whose rewards are equal.
    groups_S = torch.tensor([7, 3, 7, 5, 3, 7, 9, 5, 5, 3, 7])
    rewards_S = torch.rand(len(groups_S), generator=generator, dtype=torch.float64)
    rewards_S[groups_S == 5] = 1.0
    lengths_S = torch.randint(1, 50, (len(groups_S),), generator=generator).to(torch.float64)

    def advantages(
        about: str, order_S: Tensor, groups_S: Tensor = groups_S, fix: str = "correct it"
    ) -> Tensor:
        given = rewards_S[order_S], groups_S[order_S]
        found_S = trial.call(about, *given, fix=fix, lengths_S=lengths_S[order_S])
        trial.require_no_gradient("advantages_S", found_S)
        fix = "groups may have one member, or equal rewards, whose standard deviation is 0: add a small number to what divides"
        trial.require_finite(about, "advantages_S", found_S, fix)
        return found_S

    every_S = torch.arange(len(groups_S))
    expected_S = advantages("on made groups", every_S)
    trial.require_same_bits("advantages", expected_S, advantages("on made groups", every_S))
    order_S = torch.randperm(len(groups_S), generator=generator)
    why = (
        "the first is computed with the samples in one order, the second in another, but samples come in any order; go by group_ids_S, "
        "not by place"
    )
    trial.require_close("advantages_S", expected_S[order_S], advantages("in another order", order_S), why)
    renamed_S = torch.where(groups_S == 9, -2, groups_S + 1000)
    why = "the second is with other numbers for the same groups; group_ids_S only say which samples belong together"
    fix = "group ids are any whole numbers; number them from 0 by group_ids_S.unique(return_inverse=True)[1]"
    renamed = advantages("with group ids of -2, 1003, 1005 and 1007", every_S, renamed_S, fix)
    trial.require_close("advantages_S", expected_S, renamed, why)
    one_S = torch.tensor([3])
    advantages("on a step of a single sample", one_S)


# --------------------------------------------------------------------------------------------- weight


def _check_weight(trial: _Trial) -> None:
    generator = torch.Generator().manual_seed(0)
    masks = [torch.tensor(response, dtype=torch.bool) for response in RESPONSES]
    ratios = [0.5 * torch.randn(int(mask_T.sum()), generator=generator) for mask_T in masks]

    def weights(about: str, rows: Sequence[int], log_ratio_N: Tensor | None = None) -> list[Tensor]:
        chosen = [masks[row] for row in rows]
        cu_seqlens = torch.tensor([0, *accumulate(map(len, chosen))], dtype=torch.int32)
        valid = valid_tokens(torch.cat(chosen), cu_seqlens)
        log_ratio_N = torch.cat([ratios[row] for row in rows]) if log_ratio_N is None else log_ratio_N
        weights_N = trial.call(about, log_ratio_N, bounds_S=valid.bounds_S, segment_bounds=valid.run_bounds())
        trial.require_no_gradient("weights_N", weights_N)
        require_weights(trial.own, weights_N, log_ratio_N)
        return list(weights_N.split(valid.bounds_S.diff().tolist()))

    everything = [*range(len(masks))]
    expected = weights("on a made batch", everything)
    trial.require_same_bits("weights", torch.cat(expected), torch.cat(weights("on a made batch", everything)))
    for rows, how in _splits(len(masks)):
        about = "without response tokens" if rows == [len(masks) - 1] else f"on {how}"
        why = (
            f"the first is computed with all sequences in one batch, the second with {how}, but a weight must not depend on what else is "
            "in its batch; use means and sums over a sequence alone (by bounds_S), or settings"
        )
        for row, found_N in zip(rows, weights(about, rows), strict=True):
            trial.require_close("weights_N", expected[row], found_N, why)
    for far in (FAR, -FAR):
        weights(f"where log rho is {far:g}", everything, torch.cat(ratios).fill_(far))
