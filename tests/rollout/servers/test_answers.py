"""What is read of a server's bytes: its messages and codes, and what is done to read samples."""

import gc
import json

import pytest

from rollout.servers.answers import collection_paused, error_code, is_too_long, server_message


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ({"error": {"message": "m", "code": 5}}, "m"),
        ({"error": {"code": 5}}, "{'code': 5}"),
        ({"error": "m", "message": "other"}, "m"),
        ({"object": "error", "message": "m", "detail": "other"}, "m"),
        ({"detail": [{"msg": "m"}]}, "[{'msg': 'm'}]"),
        ({"success": False}, "{'success': False}"),
        (["m"], "['m']"),
    ],
)
def test_a_servers_message_is_found_where_it_puts_it(reply, message):
    assert server_message(json.dumps(reply).encode()) == message


def test_of_a_page_that_is_no_json_the_beginning_is_the_message():
    assert server_message(b"\xff<html>" + b"x" * 600) == "\ufffd<html>" + "x" * 493


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b'{"error": {"code": "no_available_workers"}}', "no_available_workers"),
        (b'{"error": {"message": "m"}}', None),
        (b'{"error": "m"}', None),
        (b"[7]", None),
        (b"<html>", None),
    ],
)
def test_a_routers_code_is_read_where_there_is_one(content, code):
    assert error_code(content) == code


@pytest.mark.parametrize(
    ("message", "found"),
    [
        ("Input length (250 tokens) exceeds the maximum allowed length (250 tokens). Use", True),
        ("The input (256 tokens) is longer than the model's context length (256 tokens).", True),
        ("Requested token count exceeds the model's maximum context length of 256 tokens. You", True),
        ("Request prompt exceeds the KV memory budget: input_len=90.", True),
        ("temperature must be non-negative, got -1.0.", False),
    ],
)
def test_a_prompt_without_room_is_told_by_the_servers_words(message, found):
    assert is_too_long(message) == found


@pytest.mark.parametrize("was_enabled", [True, False])
def test_garbage_is_collected_behind_an_answer_as_before_it(was_enabled):
    (gc.enable if was_enabled else gc.disable)()
    try:
        with pytest.raises(ZeroDivisionError), collection_paused():
            assert not gc.isenabled()
            _ = 1 / 0
        assert gc.isenabled() == was_enabled
    finally:
        gc.enable()
