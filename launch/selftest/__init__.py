"""``tandem selftest``: checks of a machine with the real engines, on a tiny model that it makes itself.

    check.py    a check and its outcome          bench.py   runs the work of a check in separate processes
    checks.py   the checks, in order             ranks.py   such a process; alone.py, served.py: its work
    report.py   selftest.txt and selftest.json

``launch/commands/selftest.py`` runs the checks one after another.
"""
