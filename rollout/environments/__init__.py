"""Environments: what happens between a problem and its reward, as exact tokens.

protocol.py    Environment, Context, Outcome: the interface of an environment of tokens
sequence.py    one growing sequence of tokens: what was observed, what was sampled
context.py     the context that an episode acts in
episodes.py    what makes the samples of a prompt: single turns, or episodes of an environment
rendering.py   messages to tokens by the model's chat template, behind what was sampled
tool_calls.py  tool calls in the text of a turn, by SGLang's parsers
loading.py     from the config to either
"""

from rollout.environments.protocol import Context, Environment, EpisodeEnded, Outcome

__all__ = ["Context", "Environment", "EpisodeEnded", "Outcome"]
