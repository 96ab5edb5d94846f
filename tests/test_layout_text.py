"""Layouts as text: read on the command line, and written in tables."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from configs.schema.layout import LayoutConfig, layout_text, parse_layout


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
        dict(tp=size, pp=size, vpp=size, cp=size, ep=size, sp=st.booleans(), dp=st.just("auto") | st.integers(1, 4))
    )
    return sizes.map(lambda fields: make(**fields)).filter(lambda layout: layout is not None)


@given(layouts())
def test_what_is_written_is_read_again(layout):
    assert parse_layout(layout_text(layout)) == layout
