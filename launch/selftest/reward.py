"""The reward of the selftest's runs. It differs between the answers of a random model, so there is something to learn."""


def share_of_digits(prompt: str, response: str, reference: str) -> float:
    return sum(character.isdigit() for character in response) / max(len(response), 1)
