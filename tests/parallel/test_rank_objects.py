"""Objects between gloo ranks: None, which costs one number, and everything else."""

import torch.distributed as dist

from parallel.rank_objects import from_all_ranks, from_first_rank
from rollout.client import RolloutError
from tests.support.megatron_workers import run_ranks
from trainer.ranks.interruption import StopRequested
from trainer.ranks.totals import answer_of_first_rank, on_all_ranks, on_first_rank

OBJECTS = [None, False, True, 0, "", "text", [], {"a": [1, None]}, None, StopRequested("asked"), None]


def _raised(call) -> str | None:
    try:
        call()
    except (StopRequested, RolloutError) as error:
        return f"{type(error).__name__} {error}"
    return None


def _fail(message: str):
    raise RolloutError(message)


def _three_ranks() -> dict:
    rank = dist.get_rank()
    pickled: list[str] = []
    for name in ("broadcast_object_list", "all_gather_object"):
        original = getattr(dist, name)

        def counted(*args, name=name, original=original, **kwargs):
            pickled.append(name)
            return original(*args, **kwargs)

        setattr(dist, name, counted)
    told = {"nothing": (from_first_rank(None), from_all_ranks(None)), "pickled for nothing": [*pickled]}
    told["first"] = [repr(from_first_rank(one if rank == 0 else "of another rank")) for one in OBJECTS]
    told["all"] = [repr(from_all_ranks(one if rank == 1 else None)) for one in OBJECTS]
    told["numbers"] = from_all_ranks(rank)
    pair = dist.new_group([0, 2])
    told["pair"] = from_all_ranks(f"rank {rank}", pair) if rank != 1 else None

    told["on first"] = on_first_rank(lambda: "answer")
    told["of first"] = [answer_of_first_rank(lambda answer=one: answer) for one in (None, False, "answer")]
    told["asked"] = []
    for ask_first in (on_first_rank, answer_of_first_rank):
        ask_first(lambda: told["asked"].append(rank))
    told["raised on first"] = _raised(lambda: on_first_rank(lambda: _fail("of the first")))
    told["raised for answer"] = _raised(lambda: answer_of_first_rank(lambda: _fail("of the first")))
    told["on all"] = on_all_ranks(lambda: rank)
    told["raised on all"] = _raised(lambda: on_all_ranks(lambda: rank and _fail(f"of rank {rank}")))
    pickled.clear()
    on_all_ranks(lambda: "a large result")
    on_first_rank(lambda: "a large answer")
    told["pickled for success"] = [*pickled]
    return told


def test_all_ranks_have_the_same_objects_and_none_costs_no_pickle(tmp_path):
    results = run_ranks(_three_ranks, 3, tmp_path / "ranks")
    for rank, told in enumerate(results):
        assert told["nothing"] == (None, [None] * 3)
        assert told["pickled for nothing"] == told["pickled for success"] == []
        assert told["first"] == [repr(one) for one in OBJECTS]
        assert told["all"] == [repr([None, one, None]) for one in OBJECTS]
        assert told["numbers"] == [0, 1, 2]
        assert told["pair"] == (None if rank == 1 else ["rank 0", "rank 2"])
        assert told["on first"] == (None if rank else "answer")
        assert told["of first"] == [None, False, "answer"]
        assert told["asked"] == ([] if rank else [0, 0])
        assert told["raised on first"] == told["raised for answer"] == "RolloutError of the first"
        assert told["on all"] == rank
        assert told["raised on all"] == "RolloutError of rank 1"
