"""A reward: right answers earn 1, and a short right answer a little more."""

from rollout.rewards import countdown_reward

LONGEST = 14


def score(prompt, response, reference):
    """prompt, response, reference: text. Returns (reward, parts); parts are recorded as reward/part/NAME."""
    right = countdown_reward(reference, response).value  # 1 for a right expression, else 0
    brevity = max(0.0, 1 - len(response) / LONGEST)
    return right * (1 + 0.1 * brevity), {"right": right, "brevity": brevity}
