"""Rewards of a response's length."""


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer_tokens: int) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), in [-1, 0]::

        L <= L_max - L_cache           0
        L_max - L_cache < L <= L_max   (L_max - L_cache - L) / L_cache
        L > L_max                      -1

    L is ``num_tokens`` of the response, its end token included; L_max is ``max_tokens``, L_cache
    ``buffer_tokens``.
    """
    over = num_tokens - (max_tokens - buffer_tokens)
    return -min(max(over, 0), buffer_tokens) / buffer_tokens
