"""Settings of all tests."""

import pytest
from hypothesis import settings

# No test is timed: the machines are shared, and an example that is slow today says nothing.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start engines come first: a long one that came last would be waited for by one worker alone."""
    slow = {item.path for item in items if item.get_closest_marker("engines")}
    items.sort(key=lambda item: item.path not in slow)
