"""Every fenced command of the documents is run here, or the comment right before it says why not."""

import re

import pytest

from tests.docs.pages import OUTSIDE, all_blocks, blocks_of, prose_files

BLOCKS = all_blocks()
RUN = [block for block in BLOCKS if block.reason is None]


@pytest.mark.parametrize("block", RUN, ids=[block.place for block in RUN])
def test_the_commands_of_the_documents(block, shell):
    shell(block.commands, exit_code=block.exit_code)


def test_a_reason_says_more_than_no():
    assert [
        block.place for block in BLOCKS if block.reason is not None and len(block.reason.split()) < 4
    ] == []


def test_no_command_hides_in_another_fence():
    """Indented, or under another name of the shell: such a block would be neither run nor explained."""
    for file in prose_files():
        text = file.read_text(encoding="utf-8")
        fences = re.findall(
            r"^[ \t]*```[ \t]*(?:ba|z)?sh\b|^[ \t]*```[ \t]*(?:shell|console)\b", text, re.MULTILINE
        )
        assert len(fences) == len(blocks_of(file)), file


def test_there_are_commands_of_both_kinds():
    assert len(RUN) >= 12 and len(BLOCKS) > len(RUN)
    assert any(block.place.startswith("docs/examples/") for block in RUN)
    assert {name for name in OUTSIDE if not any(block.place.startswith(name) for block in BLOCKS)} <= {
        "trainer/README.md"
    }
