"""Resumable checkpoints: written, hashed, verified, loaded; and the learner's tensors in host memory while
servers use its device.
"""
