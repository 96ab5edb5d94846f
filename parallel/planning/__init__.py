"""Arithmetic on a model and a layout, without torch: validity, memory, plans."""
