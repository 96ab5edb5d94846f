"""Adapters around Megatron-Core: models, process groups, optimizer, attention. ``parallel/engine.py`` puts
them together.
"""
