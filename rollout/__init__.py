"""Sampling: SGLang servers, the sample role, tasks and rewards. Never holds the learner's weights."""
