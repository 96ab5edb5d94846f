"""Resumable checkpoints, and offloading of the learner's tensors to host memory."""
