"""A run's processes from outside: its folder, addresses and placement, their supervision, signs of life
and end.
"""
