"""The order of the training prompts: shuffled, as in the file, or by a function of the user's own."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from configs.schema.sampler import FileOrder, FunctionOrder, SamplerConfig, ShuffledOrder
from rollout.rewards.trial_process import TrialProcess
from rollout.sampling import order as order_module
from rollout.sampling.order import epoch_order, prompt_order

ORDERS = """
import itertools, random

calls = itertools.count()

def easy_first(num_prompts, seed, epoch, rows, field="difficulty"):
    return sorted(range(num_prompts), key=lambda i: rows[i][field])

def weighted(num_prompts, seed, epoch, **weights):
    return random.Random(f"{seed} {epoch}").choices(range(num_prompts), k=num_prompts)

def forgetful(num_prompts, seed, epoch):
    return [next(calls) % num_prompts] * num_prompts

def told(num_prompts, seed, epoch):
    return [seed, epoch, num_prompts - 1]

def short(num_prompts, seed, epoch):
    return range(num_prompts // 2)

def several(num_prompts, seed, epoch):
    return range(1, 2) if num_prompts == 1 else range(num_prompts)

def later(num_prompts, seed, epoch):
    return [next(calls) % num_prompts if epoch else 0] * num_prompts

def sized(num_prompts, seed, epoch, rows):
    assert len(rows) == num_prompts
    return range(num_prompts)

def beyond(num_prompts, seed, epoch):
    return range(1, num_prompts + 1)

def before(num_prompts, seed, epoch):
    return range(-1, num_prompts - 1)

def texts(num_prompts, seed, epoch):
    return ["a"] * num_prompts

def leaves(num_prompts, seed, epoch):
    exit()

def two(num_prompts, seed):
    return range(num_prompts)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "my_orders.py").write_text(ORDERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def own(name: str, **more) -> FunctionOrder:
    return FunctionOrder.model_validate({"type": "function", "function": f"my_orders:{name}", **more})


@given(num=st.integers(1, 40), seed=st.integers(0, 9), epoch=st.integers(0, 5))
def test_built_in_orders_take_each_prompt_once(num, seed, epoch):
    shuffled = prompt_order(ShuffledOrder(), num, seed=seed, rows=list)(epoch)
    assert list(shuffled) == epoch_order(num, seed=seed, epoch=epoch) and sorted(shuffled) == list(range(num))
    assert list(prompt_order(FileOrder(type="sequential"), num, seed=seed, rows=list)(epoch)) == list(
        range(num)
    )


def test_each_seed_and_each_epoch_has_an_order_that_stays():
    """A run that another version of Tandem resumes must find it."""
    orders = {tuple(epoch_order(40, seed=seed, epoch=epoch)) for seed in (0, 1) for epoch in (0, 1)}
    assert len(orders) == 4
    assert epoch_order(6, seed=0, epoch=1) == [3, 2, 4, 5, 1, 0]


def test_a_function_gets_the_records_if_it_wants_them():
    rows = [{"difficulty": 5}, {"difficulty": 1}, {"difficulty": 3}]
    assert prompt_order(own("easy_first"), 3, seed=0, rows=lambda: rows)(0) == [1, 2, 0]
    other = own("easy_first", settings={"field": "other"})
    with pytest.raises(
        ValueError, match=r"easy_first'.*for 3 prompts in epoch 0, it raised KeyError: 'other'"
    ):
        prompt_order(other, 3, seed=0, rows=lambda: rows)(0)
    repeated = prompt_order(own("weighted"), 50, seed=0, rows=list)
    assert repeated(1) == repeated(1) != repeated(2) and len({*repeated(1)}) < 50


def test_a_function_is_told_seed_and_epoch_and_gives_as_many_indices_as_there_are_prompts():
    assert prompt_order(own("told"), 3, seed=2, rows=list)(1) == [2, 1, 2]
    for num_prompts in (2, 4):
        with pytest.raises(ValueError, match=f"for {num_prompts} prompts in epoch 0, it returned 3 indices"):
            prompt_order(own("told"), num_prompts, seed=0, rows=list)(0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("short", "for 8 prompts in epoch 0, it returned 4 indices; return one index for each prompt"),
        ("beyond", "it returned the index 8; return 0 to 7"),
        ("before", "it returned the index -1; return 0 to 7"),
        ("texts", "it raised TypeError: 'str' object cannot be interpreted as an integer"),
        ("leaves", "it raised SystemExit"),
        ("forgetful", "two calls for epoch 0 gave different orders, but a resumed run calls again"),
        ("two", r"it must take \(num_prompts, seed, epoch\) and its settings"),
        ("missing", "my_orders has no 'missing'"),
    ],
)
def test_a_function_that_breaks_its_contract_is_refused_before_a_start(name, message):
    with TrialProcess(order_module.__name__, tell=lambda text: None) as process:
        assert process.reply("starting", "limit", 60.0, "wait") is None
        job = (
            "call",
            own(name).model_dump(include={"function", "settings", "check", "check_timeout_s"}),
            None,
        )
        assert re.search(message, process.ask(job, "trying", "limit", 60.0, "wait"))


def test_the_trial_calls_for_several_epochs_and_for_a_single_prompt():
    def attempt(what: str, name: str, row: dict | None = None) -> None:
        fields = own(name).model_dump(include={"function", "settings", "check", "check_timeout_s"})
        order_module._attempt(what, fields, row)

    with pytest.raises(ValueError, match="two calls for epoch 1 gave different orders"):
        attempt("call", "later")
    with pytest.raises(ValueError, match="for 1 prompts in epoch 0, it returned the index 1; return 0 to 0"):
        attempt("call", "several")
    attempt("call", "sized", {})
    attempt("import", "leaves")


def test_the_trial_accepts_functions_that_keep_to_it():
    with TrialProcess(order_module.__name__, tell=lambda text: None) as process:
        assert process.reply("starting", "limit", 60.0, "wait") is None
        for name, row in (("weighted", None), ("easy_first", {"difficulty": 1})):
            fields = own(name).model_dump(include={"function", "settings", "check", "check_timeout_s"})
            assert process.ask(("call", fields, row), "trying", "limit", 60.0, "wait") is None


@pytest.mark.parametrize("name", ["epoch", "rows"])
def test_settings_may_not_take_the_names_that_tandem_gives(name):
    with pytest.raises(ValueError, match=f"settings hold {name}, which Tandem itself passes; rename it"):
        prompt_order(own("weighted", settings={name: 3}), 3, seed=0, rows=list)


def test_the_config_names_an_order_by_its_type():
    adapter = TypeAdapter(SamplerConfig)
    assert adapter.validate_python({"type": "shuffle"}) == ShuffledOrder()
    assert adapter.validate_python({"type": "function", "function": "a:b"}) == FunctionOrder(
        type="function", function="a:b"
    )
