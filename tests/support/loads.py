"""Loads of made batches."""

from parallel.planning.flops import Load


def whole_samples(samples: int, places: int, response: int) -> Load:
    """The load of samples of one length that share no prompt. places: tokens of each that the model computes."""
    return Load(
        tokens=samples * places,
        pairs=samples * (places * (places + 1) // 2),
        predicted=samples * response,
    )
