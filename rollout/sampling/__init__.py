"""Prompts to groups of scored responses: the sampler, the sample role around it, and the learner's side of
both.
"""
