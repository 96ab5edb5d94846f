"""Prompts to groups of scored responses: sampler, sample role, and the learner's side of both."""
