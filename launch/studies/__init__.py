"""Commands that start engines to measure or prove something: ``mismatch``, ``verify-sync``; and
``replay``, which needs none.
"""
