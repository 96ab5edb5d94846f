"""The algorithm: the step on one page (``loop.py``), its mathematics, and what is tracked of it."""
