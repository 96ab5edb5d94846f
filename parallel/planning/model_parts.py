"""Parts of a model that not every one has: experts, latent attention, recurrent layers."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The mixture-of-experts part of a model. Router weights are the chosen experts' scores: a softmax over all
    experts, or a sigmoid of each.

    ``norm_topk``: whether the weights are divided by their sum. ``is_sparse``: per layer, whether it has
    experts or a dense MLP.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    norm_topk: bool
    is_sparse: tuple[bool, ...]
    score: Literal["softmax", "sigmoid"] = "softmax"
    float32_logits: bool = False
    """Whether the router's logits are float32 whatever the model's dtype is, as in transformers and on SGLang's GPUs."""
    has_bias: bool = False
    """Whether experts are chosen by score + bias. The bias is kept as it was loaded: the loss has no gradient of it."""
    scale: float = 1.0
    """By which the weights are multiplied at last."""
    shared_size: int = 0
    """Intermediate size of the MLP that every token goes through beside its experts; 0: there is none."""
    clamp: float | None = None
    """Greatest gate, and greatest up in either direction, of experts with gpt-oss's activation: gate sigmoid(1.702 gate)
    (up + 1). None: silu(gate) up. The former have biases, and one tensor of a folder has all experts of a layer."""
    has_shared_gate: bool = False
    """Whether the sigmoid of a product of each token multiplies that MLP's output."""
    num_groups: int = 1
    """Groups of equally many experts, in their order. A token's experts are of its ``top_groups`` best groups, by the best
    expert of each, or with a sigmoid by the sum of the two best."""
    top_groups: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Attention whose keys and values are products of one short vector of each token (multi-head latent attention, MLA;
    DeepSeek-V2, arXiv 2405.04434, 2.1).

    A head of a query or a key has ``head_dim`` numbers, of which ``rotary_size`` are rotated. These are the same in all
    keys of a token.
    """

    query_rank: int | None
    """Numbers of the vector that queries are products of. None: they are products of the hidden state."""
    rank: int
    """Numbers of the vector that keys and values are products of."""
    value_dim: int
    """Numbers of a value's head."""
    is_interleaved: bool
    """Whether the numbers of a rotated pair are neighbours. False: they are in the two halves."""
    scale: float
    """Of the scores of attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrent:
    """Layers whose state is a matrix of each head, not the keys and values of all tokens: gated delta nets (linear attention;
    arXiv 2412.06464). Value heads share key heads, as many neighbours each.

    The model's other layers have attention with a gate at its output, and all its norms but those of gated delta nets
    multiply by 1 + weight.
    """

    is_recurrent: tuple[bool, ...]
    """Per layer."""
    key_heads: int
    value_heads: int
    key_dim: int
    """Numbers of a head of a query or key."""
    value_dim: int
    """Numbers of a value's head."""
    width: int
    """Tokens that the convolution sees, itself included."""

    @property
    def convolved(self) -> int:
        """Numbers of queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def group_rows(self) -> tuple[int, ...]:
        """Of a key head: the numbers of its query, its key, its value heads and their gates, steps and decays."""
        shared = self.value_heads // self.key_heads
        values = shared * self.value_dim
        return self.key_dim, self.key_dim, values, values, shared, shared
