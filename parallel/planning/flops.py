"""FLOPs of a learner rank: arithmetic on an architecture, a layout and the tokens of packed samples. No torch.

A product of an m x k by a k x n matrix is 2 m k n. The numbers are those that ``tandem simulate`` counts
(``parallel/simulation/``); a test compares the two, FLOP for FLOP. Norms, activations and the softmax over the
vocabulary are not counted on either side.

Legend: as in ``memory.py``; R response tokens, the only ones that get logits; k experts of a token.
"""

from dataclasses import dataclass

from configs.schema.layout import LayoutConfig
from configs.schema.learner import LoraConfig
from parallel.planning.architecture import CHUNK, Architecture, padded_vocab_size
from parallel.planning.model_parts import Recurrent
from parallel.planning.work import row_counts, stage_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What of packed samples decides their FLOPs, of all ranks of a copy of the model together. Sums over
    micro-batches are the load of all of them."""

    tokens: int
    """T."""
    pairs: int
    """Pairs of a token and one that it attends to, itself included: n (n + 1) / 2 of a sample of n tokens."""
    predicted: int
    """R."""

    def divided(self, parts: int) -> "Load":
        """An equal share, rounded up: the fullest of ``parts`` ranks."""
        return Load(
            tokens=-(-self.tokens // parts),
            pairs=-(-self.pairs // parts),
            predicted=-(-self.predicted // parts),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Flops:
    """Of one rank."""

    matrices: int
    """Products with weights."""
    attention: int
    """Products between tokens."""
    output: int
    """The logits."""
    rule: int = 0
    """Of gated delta nets: products of a chunk's tokens with one another and with the state."""

    @property
    def total(self) -> int:
        return self.matrices + self.attention + self.output + self.rule


def forward_flops(
    architecture: Architecture, layout: LayoutConfig, stage: int, load: Load, *, output: bool = True
) -> Flops:
    """FLOPs of a forward pass of a stage on its fullest rank. ``output=False``: a critic, without logits.

    A layer: qkv and projection 2 T (H (A + 2 K) D + A D H) / t (of latent attention and of gated delta nets
    ``Architecture.mixer_numbers``, what is whole of the rank's own rows); an MLP 2 T 3 H I / t, or, of the rank's own rows, a
    router 2 T H E and 2 T k 3 H I of the chosen experts, spread evenly over the ranks, so that it does as much for
    others as they do for it, and beside them 2 T 3 H S / t of a shared expert of size S. Attention: two products of 2 D
    for each pair and query head, 4 D A / t; of a layer with a window at most T times the window; of a gated delta net
    ``rule_flops``. Logits: 2 R H V / t.
    Context parallelism divides all by C.
    """
    a, t = architecture, layout.tp
    rows, tokens = row_counts(layout, load.tokens)
    layers = stage_layers(a, layout, stage)
    sparse = sum(map(a.is_sparse, layers))
    numbers = [a.mixer_numbers(layer) for layer in layers]
    matrices = 2 * sum(tokens * (split // t) + rows * whole for split, whole in numbers)
    matrices += 2 * tokens * (len(layers) - sparse) * (3 * a.hidden_size * a.intermediate_size // t)
    if a.experts and sparse:
        chosen = a.experts.experts_per_token * 3 * a.hidden_size * a.experts.intermediate_size
        outputs = a.experts.num_experts + a.experts.has_shared_gate
        matrices += 2 * rows * sparse * (a.hidden_size * outputs + chosen)
        matrices += 2 * tokens * sparse * (3 * a.hidden_size * a.experts.shared_size // t)
    pairs = sum(_pairs(a, layer, load) for layer in layers if not a.is_recurrent(layer))
    attention = 4 * a.head_dim * (a.num_heads // t) * pairs // layout.cp
    recurrent = sum(a.is_recurrent(layer) for layer in layers)
    rule = 0 if a.recurrent is None else recurrent * tokens * rule_flops(a.recurrent, t)
    logits = 0
    if output and stage == layout.pp - 1:
        # The first rank's rows of the vocabulary; padding takes no part.
        vocabulary = min(padded_vocab_size(a.vocab_size, t) // t, a.vocab_size)
        logits = 2 * -(-load.predicted // layout.cp) * a.hidden_size * vocabulary
    return Flops(matrices=matrices, attention=attention, output=logits, rule=rule)


def rule_flops(recurrent: Recurrent, t: int) -> int:
    """FLOPs of the gated delta rule for each token, N numbers of a key and V of a value, in chunks of C: A / t heads of
    4 C N + 2 C V within the chunk and 6 N V with the state. The triangular system is not counted."""
    r = recurrent
    within = CHUNK * (4 * r.key_dim + 2 * r.value_dim)
    return r.value_heads // t * (within + 6 * r.key_dim * r.value_dim)


def _system_flops(a: Architecture, layout: LayoutConfig, stage: int, load: Load) -> int:
    """Of the gradient of the rules' triangular systems: 2 C (N + V) for each token and head."""
    r = a.recurrent
    if r is None:
        return 0
    layers = sum(a.is_recurrent(layer) for layer in stage_layers(a, layout, stage))
    _, tokens = row_counts(layout, load.tokens)
    return layers * tokens * (r.value_heads // layout.tp) * 2 * CHUNK * (r.key_dim + r.value_dim)


def _pairs(a: Architecture, layer: int, load: Load) -> int:
    """Pairs of a layer. Under a window a token has at most as many as the window has tokens: an upper bound."""
    window = a.windows[layer] if a.windows else None
    return load.pairs if window is None else min(load.pairs, load.tokens * window)


def update_flops(
    architecture: Architecture,
    layout: LayoutConfig,
    stage: int,
    load: Load,
    *,
    recompute: str,
    lora: LoraConfig | None = None,
    output: bool = True,
) -> Flops:
    """FLOPs of forward and backward passes, and of layers that are computed again (``recompute: full``).

    Backward has two products for each of forward, for the gradients of input and weight, and five in place of
    attention's two. Logits and the rule of gated delta nets are computed again, whatever ``recompute`` says. A frozen weight has
    no gradient: one product fewer, also of an output layer beside adapters; merged adapters take that of the merged weight all
    the same. The adapters' own products are left out.
    """
    forward = forward_flops(architecture, layout, stage, load, output=output)
    again = 1 if recompute == "full" else 0
    backward = 1 if lora is not None and lora.forward == "factored" else 2
    of_output = 3 if lora is not None else 4
    return Flops(
        matrices=forward.matrices * (1 + again + backward),
        attention=forward.attention * (1 + again) + forward.attention * 5 // 2,
        output=forward.output * of_output,
        rule=forward.rule * 4 + _system_flops(architecture, layout, stage, load),
    )
