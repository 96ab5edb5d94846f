"""Facts that ranks share: totals over data-parallel ranks, metrics with their reduction, agreed
interruptions.
"""
