"""Arithmetic on a model and a layout: validity, memory, plans. Without torch, so that it runs before
anything starts.
"""
