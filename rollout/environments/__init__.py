"""Environments: what happens between a problem and its reward, as exact tokens.

protocol.py      Environment, Context, Outcome: the interface of an environment of tokens
sequence.py      one growing sequence of tokens: what was observed, what was sampled
context.py       the context that an episode acts in
episodes.py      makes the samples of a prompt: single turns, or episodes of an environment
loading.py       builds either of them from the config

chat.py          an environment of messages, on top of tokens
rendering.py     the tokens of new messages, by the model's chat template
tool_calls.py    the tool calls in a text, found by SGLang's parsers in a separate process
processes.py     the processes that run the user's environments; tandem_worker/ is the code in them

openenv.py       environments on OpenEnv servers, instead of processes

agent.py         an agent as an environment: a separate program that requests its turns
agent_process.py its process; agent_template.py forks it from one that has imported its modules
gateway.py       the OpenAI server that it calls; openai_form.py has the form of requests and answers,
                 gateway_session.py joins an episode's requests to sequences of tokens

Not here: the order of the problems and the limit of staleness (rollout/sampling/), rewards (rollout/rewards/).
"""

from rollout.environments.protocol import Context, Environment, EpisodeEnded, Outcome

__all__ = ["Context", "Environment", "EpisodeEnded", "Outcome"]
