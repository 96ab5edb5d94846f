"""Adapters around Megatron-Core, which ``parallel/engine.py`` uses: models, groups, optimizer, attention."""
