"""The mathematics of a step as pure functions on packed tokens: advantages, correction, losses,
diagnostics. No engine, no I/O.
"""
