"""Settings of all tests."""

from hypothesis import settings

# No test is timed: the machines are shared, and an example that is slow today says nothing.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
