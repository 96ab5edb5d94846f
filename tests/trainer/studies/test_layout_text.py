"""Layouts as text: read on the command line, and written in tables."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from configs.schema.layout import LayoutConfig, as_overrides, layout_text, parse_layout


@pytest.mark.parametrize(
    "text, fields",
    [
        ("", {}),
        ("tp=2", dict(tp=2)),
        ("tp=2,sp", dict(tp=2, sp=True)),
        (" tp=2 , sp=false, dp=auto ", dict(tp=2)),
        ("pp=2,vpp=2,dp=3", dict(pp=2, vpp=2, dp=3)),
        ("ep=2,dp=2", dict(ep=2, dp=2)),
    ],
)
def test_what_is_written_is_what_is_meant(text, fields):
    assert parse_layout(text) == LayoutConfig(**fields)


@pytest.mark.parametrize(
    "text, message",
    [
        ("tpp=2", "layout 'tpp=2': unknown field 'tpp'; did you mean `tp`"),
        ("tp", "tp is no value of this field; write tp=N"),
        ("tp=two", "tp=two is no value"),
        ("tp=-1", "tp=-1 is no value"),
        ("tp=", "tp= is no value"),
        ("tp=0", "tp: .*greater than or equal to 1, not 0"),
        ("sp=2,tp=2", "sp=2 is no value of this field; write sp, sp=true or sp=false"),
        ("tp=2,tp=4", "gives tp twice"),
        ("sp", "sp=true splits tokens .* set tp=2 or more"),
        ("vpp=2", "vpp=2 interleaves"),
        ("tp=2;sp", "tp=2;sp is no value"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(text, message):
    with pytest.raises(ValueError, match=message) as caught:
        parse_layout(text)
    assert not isinstance(caught.value, ValidationError) and "\n" not in str(caught.value)


def layouts() -> st.SearchStrategy:
    def make(**fields) -> LayoutConfig | None:
        try:
            return LayoutConfig(**fields)
        except ValidationError:
            return None

    size = st.integers(1, 4)
    sizes = st.fixed_dictionaries(
        dict(
            tp=size,
            pp=size,
            vpp=size,
            cp=size,
            ep=size,
            sp=st.booleans(),
            dp=st.just("auto") | st.integers(1, 4),
        )
    )
    return sizes.map(lambda fields: make(**fields)).filter(lambda layout: layout is not None)


@given(layouts())
def test_what_is_written_is_read_again(layout):
    """One copy of the model is what is meant where nothing is said, wherever ep allows it."""
    assert parse_layout(layout_text(layout)).smallest() == layout.smallest()


@given(layouts(), layouts())
def test_one_layout_has_one_text(one, other):
    one, other = one.smallest(), other.smallest()
    assert (layout_text(one) == layout_text(other)) == (one == other)


def test_the_fields_stand_in_their_order():
    assert layout_text(LayoutConfig(tp=2, sp=True, pp=4, vpp=2, ep=2, dp=8)) == "tp=2,pp=4,vpp=2,sp,ep=2,dp=8"
    assert layout_text(LayoutConfig(dp=1)) == layout_text(LayoutConfig()) == "tp=1"


@given(layouts())
def test_the_smallest_has_as_few_copies_as_ep_allows(layout):
    smallest = layout.smallest()
    if layout.dp != "auto":
        assert smallest == layout
    else:
        counts = [dp for dp in range(1, 5) if (layout.tp * layout.cp * dp) % layout.ep == 0]
        assert smallest == layout.model_copy(update={"dp": counts[0]})


@given(layouts(), st.integers(1, 64))
def test_auto_is_all_processes_or_one_plain_sentence(layout, processes):
    try:
        resolved = layout.resolved(processes)
    except ValueError as error:
        assert processes % layout.smallest().world_size
        assert (
            not isinstance(error, ValidationError)
            and str(error).startswith("layout.dp=auto: ")
            and "\n" not in str(error)
        )
    else:
        assert resolved.world_size == processes if layout.dp == "auto" else resolved == layout


def test_overrides_of_a_layout():
    overrides = as_overrides(LayoutConfig(tp=2, sp=True))
    assert overrides == [
        "layout.tp=2", "layout.pp=1", "layout.vpp=1", "layout.sp=true", "layout.cp=1", "layout.ep=1", 'layout.dp="auto"'
    ]  # fmt: skip
