"""``tandem selftest``: checks of a machine with the real engines, on a tiny model that it makes itself.

    check.py    what a check is, and what comes of it          bench.py   runs the work of a check in processes of its own
    checks.py   the checks, in order                           ranks.py   such a process; alone.py, served.py: its work
    report.py   selftest.txt and selftest.json

``launch/commands/selftest.py`` runs the checks one after another.
"""
