"""The learner's ranks while they wait for samples: a sample role that is replaced, servers without weights."""

import pytest
import torch.distributed as dist

from rollout.client import RolloutError
from rollout.sampling.messages import SampleRoleLost, SamplingError
from tests.support.megatron_workers import run_ranks
from trainer import sampling
from trainer.ranks.interruption import StopRequested
from trainer.sampling import SharedSampler


class Role:
    """In the place of RemoteSampler. ``lives`` is what each request of it meets, in turn: None is an answer,
    "lost" the end of the role, a number as many looks around before the answer."""

    def __init__(self, lives: list, successors: int = 9):
        self.lives, self.successors, self.done = lives, successors, []

    def next_groups(self, count, *, meanwhile, **limits):
        what = self.lives.pop(0) if self.lives else None
        if what == "lost":
            raise SampleRoleLost("the sample role is gone")
        for _ in range(what or 0):
            meanwhile()
        self.done.append(f"groups {count}")
        return [], None, {"position": 7, "num_prompts": 9}

    def admit(self, count, *, newest, ahead, meanwhile):
        meanwhile()
        self.done.append(f"admit {count} of {newest}")

    def evaluate(self, *, meanwhile):
        meanwhile()

    def load_state(self, state):
        if self.lives[:1] == ["lost at the start"]:
            raise SampleRoleLost(self.lives.pop(0))
        self.done.append(state and state["position"])

    def follow(self, *, within_s, meanwhile):
        meanwhile()
        self.successors -= 1
        return self.successors >= 0


class Weights:
    def __init__(self, needed: list[bool], fails: Exception | None = None):
        self.needed, self.fails, self.sent = needed, fails, 0

    def are_needed(self) -> bool:
        return self.needed.pop(0) if self.needed else False

    def send_again(self) -> None:
        self.sent += 1
        together = [None] * dist.get_world_size()
        dist.all_gather_object(together, self.sent)
        assert set(together) == {self.sent}
        if self.fails:
            raise self.fails


def next_groups(sampler: SharedSampler):
    return sampler.next_groups(3, newest=0, max_staleness=0, ahead=0)


def _two_ranks() -> dict:
    sampling.LOOK_EVERY_S = 0.0
    rank, told = dist.get_rank(), {}

    weights, role = Weights([False, True, True]), Role([5])
    sampler = SharedSampler(role if rank == 0 else None, weights=weights)
    told["groups"] = next_groups(sampler).groups
    told["sent"] = weights.sent
    dist.barrier()

    failing = SharedSampler(
        Role([5]) if rank == 0 else None, weights=Weights([True], fails=RolloutError("none was ready again"))
    )
    with pytest.raises(RolloutError, match="none was ready again"):
        next_groups(failing)
    dist.barrier()

    role = Role(["lost", "lost", None, "lost", None])
    said: list[str] = []
    sampler = SharedSampler(role if rank == 0 else None, role_start_s=1.0, say=said.append)
    next_groups(sampler)
    next_groups(sampler)
    told["done"], told["said"] = role.done, [*said]

    given_up = SharedSampler(Role(["lost", "lost"], successors=1) if rank == 0 else None, say=said.append)
    with pytest.raises(SamplingError, match="is gone"):
        next_groups(given_up)
    role = Role(["lost"])  # and then a stop is asked for
    stopped = SharedSampler(role if rank == 0 else None, lambda: None if role.lives else "asked")
    with pytest.raises(StopRequested, match="asked"):
        next_groups(stopped)
    dist.barrier()
    at_once = SharedSampler(
        Role([5]) if rank == 0 else None, weights=Weights([True], fails=StopRequested("in between"))
    )
    with pytest.raises(StopRequested, match="in between"):
        next_groups(at_once)
    dist.barrier()

    role, weights = Role(["lost", None]), Weights([True])
    resumed = SharedSampler(role if rank == 0 else None, weights=weights, role_start_s=1.0, say=said.append)
    resumed.load_state({"position": 3, "num_prompts": 9})
    resumed.drain(0.0)  # asks nobody: this role knows no such request
    next_groups(resumed)
    resumed.admit(3, newest=1, ahead=0)
    resumed.evaluate()
    told["resumed"] = (role.done, weights.sent)
    return told


def test_ranks_that_wait_send_weights_together_and_a_successor_gets_the_position(tmp_path):
    first, second = run_ranks(_two_ranks, 2, tmp_path / "ranks")
    assert (first["groups"], second["groups"]) == ([], None)
    assert first["sent"] == second["sent"] == 2
    # Two successors before the first groups, of the start; one before the second, of the position then.
    assert first["done"] == [None, None, "groups 3", 7, "groups 3"] and second["done"] == []
    assert len(first["said"]) == 3 and "its successor continues" in first["said"][0] and not second["said"]
    assert (first["resumed"], second["resumed"]) == (([3, 3, "groups 3", "admit 3 of 1"], 1), ([], 1))


def test_a_successor_that_comes_before_the_first_request_begins_at_the_checkpoints_position():
    role, said = Role(["lost at the start"]), []
    sampler = SharedSampler(role, role_start_s=1.0, say=said.append)
    sampler.load_state({"position": 5})
    assert role.done == [5] and sampler.state() == {"position": 5}
    assert said == ["lost at the start; its successor continues"]
    with pytest.raises(SampleRoleLost):
        SharedSampler(Role(["lost at the start"], successors=0)).load_state(None)
