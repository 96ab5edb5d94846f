"""Bytes of the activations of a learner rank, an item of ``memory.py``, whose legend this is."""

from configs.schema.layout import LayoutConfig
from parallel.planning.architecture import (
    CHUNK,
    ROTATED_IN_FLOAT32,
    SINK_SIZE,
    WINDOW_BLOCK,
    Architecture,
    padded_vocab_size,
)
from parallel.planning.model_parts import Latent
from parallel.planning.work import Work, in_flight, row_counts, stage_layers


def activation_bytes(architecture: Architecture, layout: LayoutConfig, work: Work, stage: int) -> int:
    """Greatest memory of autograd for the micro-batches in flight on a stage.

    Each pass keeps its chunk's layers, under recompute only the input of each, b H a token; one layer at a
    time is then computed again and kept whole. All stages keep the rotary tables, b a token for each rotated number of a
    head, or 4 where GPUs rotate in float32; with windows twice that at most, and a mask of B (B - 1 + W) numbers for blocks of B
    queries and windows of W tokens. The last stage keeps the final norm and its output, the input of the log-probs,
    until layers are computed again.
    """
    layers = stage_layers(architecture, layout, stage)
    passes = in_flight(layout, stage, work.num_microbatches)
    whole = _whole_layers(architecture, layout, work, stage)
    rows, tokens = row_counts(layout, work.token_budget)
    per_chunk = len(layers) // layout.vpp
    in_float32 = work.device == "cuda" and architecture.rotated_head in ROTATED_IN_FLOAT32
    tables = passes * tokens * architecture.rotary_size * (4 if in_float32 else work.dtype_bytes)
    windows = {architecture.windows[layer] for layer in layers if architecture.windows} - {None}
    if windows:  # which may rotate by tables of their own; one mask for all layers with a window
        tables *= 2
        tables += sum(WINDOW_BLOCK * (WINDOW_BLOCK - 1 + w) * work.attention_bytes for w in windows if w)
    hidden_bytes = architecture.hidden_size * work.dtype_bytes
    end = _end_bytes(architecture, layout, work) if stage == layout.pp - 1 else 0
    if work.recompute == "full":
        return tables + passes * per_chunk * rows * hidden_bytes + max(end, *whole)
    # Chunks differ where a model has dense and sparse layers.
    chunks = [range(first, first + per_chunk) for first in range(0, len(whole), per_chunk)]
    largest_chunk = max(sum(whole[i] for i in chunk) for chunk in chunks)
    # A recurrent layer that is computed again in a backward pass: its first norm and product, and the rule's tensors.
    mixed = rows * (_norm_row(architecture, architecture.hidden_size, work) + hidden_bytes)
    mixed += tokens * work.dtype_bytes * _mixed(architecture) // layout.tp
    mixed += rule_bytes(architecture, layout, work)
    # The layers before it are there too.
    before = [
        sum(whole[chunk[0] : i]) + mixed
        for chunk in chunks
        for i in chunk
        if architecture.is_recurrent(layers[i])
    ]
    return tables + (passes - 1) * largest_chunk + max(largest_chunk + end, *before, 0)


def _mixed(architecture: Architecture) -> int:
    """Numbers of a token that a gated delta net's first product makes."""
    r = architecture.recurrent
    return 0 if r is None else r.key_heads * sum(r.group_rows)


def _whole_layers(architecture: Architecture, layout: LayoutConfig, work: Work, stage: int) -> list[int]:
    layers = stage_layers(architecture, layout, stage)
    whole = [layer_activation_bytes(architecture, layout, work, layer) for layer in layers]
    if work.recompute == "none":
        return whole
    # The product is no input of another pass then.
    rule = rule_bytes(architecture, layout, work) - row_counts(layout, work.token_budget)[1] * (
        work.dtype_bytes * _mixed(architecture) // layout.tp
    )
    return [size + rule * architecture.is_recurrent(layer) for size, layer in zip(whole, layers, strict=True)]


def _end_bytes(architecture: Architecture, layout: LayoutConfig, work: Work) -> int:
    """The final norm and its output."""
    rows, tokens = row_counts(layout, work.token_budget)
    norm = rows * _norm_row(architecture, architecture.hidden_size, work)
    return norm + tokens * architecture.hidden_size * work.dtype_bytes


def waiting_gradient(architecture: Architecture, layout: LayoutConfig, work: Work) -> int:
    """The gradient of a tied output layer, b V H / t, which waits for the embedding's to be added while layers are computed
    again. Without recomputation all layers are whole while the logits, which count it, are there."""
    is_shared = architecture.tied and layout.pp == 1 and work.lora is None
    if not is_shared or work.recompute == "none":
        return 0
    rows = padded_vocab_size(architecture.vocab_size, layout.tp) // layout.tp
    return work.dtype_bytes * rows * architecture.hidden_size


def logits_beside(architecture: Architecture, layout: LayoutConfig, work: Work, stage: int) -> int:
    """What the log-probs' backward pass takes beside the activations. Under recompute no layer is whole then: it is what
    they take, with the final norm, beyond the whole layer that the activations count."""
    return max(
        0, logits_bytes(architecture, layout, work) - _free_at_logits(architecture, layout, work, stage)
    )


def _free_at_logits(architecture: Architecture, layout: LayoutConfig, work: Work, stage: int) -> int:
    """What the activations count that is not there with the logits."""
    if work.recompute == "none":
        return 0
    end = _end_bytes(architecture, layout, work)
    layer = max(end, *_whole_layers(architecture, layout, work, stage))
    return layer + waiting_gradient(architecture, layout, work) - end


def batch_kept_bytes(architecture: Architecture, work: Work) -> int:
    """The kept ids of a micro-batch (``KeptSets``), 4 k T. They are on the device until its forward pass ends, whole on every
    rank of context parallelism. k: those of a token, at most."""
    return 4 * _kept_of_token(architecture, work) * work.token_budget


def kept_beside(architecture: Architecture, layout: LayoutConfig, work: Work, stage: int) -> int:
    """What the kept ids take beside the activations and ``logits_beside`` where the logits are, at most.

    The ids of this rank's T / C tokens are copied, 4 k a token, and get their place and column in the logits, 16 k, of which
    all may be on one tensor-parallel rank (``vocab_parallel._KeptHere``). These stay until the backward pass of the logits
    ends, beside the places and logits of a chunk's ids, 12 k a token. Making them takes 25 k more for a moment, in the forward
    pass, when there are no logits yet but the batch's ids.
    """
    k, tokens = _kept_of_token(architecture, work), -(-work.token_budget // layout.cp)
    stays, logits = 20 * k * tokens, logits_bytes(architecture, layout, work)
    backward = logits + stays + 12 * k * min(work.chunk_tokens, tokens)
    forward = batch_kept_bytes(architecture, work) + stays + 25 * k * tokens
    return max(0, max(backward, forward) - max(logits, _free_at_logits(architecture, layout, work, stage)))


def _kept_of_token(architecture: Architecture, work: Work) -> int:
    return min(work.kept_ids, architecture.vocab_size)


def layer_activation_bytes(architecture: Architecture, layout: LayoutConfig, work: Work, layer: int) -> int:
    """Memory of autograd for one layer and micro-batch: the tensors that the local layers' operations save,
    each storage once.

    Two norms, each with its output: ``_norm_row`` and b H a token, of T / t tokens under sequence parallelism.
    Attention on T tokens, A / t and K / t heads (at least one key/value head): rotated queries and the output,
    2 c D A; keys and values, see ``_keys_and_values``, or of latent attention 2 c D A and, of T / t tokens, ``_latent_row``;
    the sums of the softmax, 4 A; the packed output for the projection, b D A, or b V A of values of another size. Norms of
    queries and keys: see ``_qk_norm_token``. MLP on T tokens: the halves of gate and up, 2 I, and silu(gate) up: 3 b I / t;
    with aligned numerics silu(gate) and up beside them.
    Experts on the rank's own T tokens (T / t under sequence parallelism), if the router spreads tokens evenly
    over ranks: for each chosen expert the token b H, 3 b I, and b I for the product times the router's weight;
    8 bytes an expert for the router's probabilities and choice; of float32 logits a copy of a 2-byte input, 4 H. A shared
    expert of size S is an MLP on T tokens.

    Of a gated delta net: the product of T tokens with its inputs' matrices, and the output for the projection, b A V / t;
    what the rule keeps of one layer at a time is ``rule_bytes``. With a gate at attention's output the qkv product has A D
    more, and the gate's sigmoid is kept, 4 A D, and the output that it multiplies, b A D.

    A frozen matrix keeps no input. Beside adapters that of a matrix is therefore kept where it has one (``_inputs``), and
    b r a token and adapter for A x; of experts it is never kept. Merged weights are not kept but made again.
    """
    a, b, c = architecture, work.dtype_bytes, work.attention_bytes
    rows, tokens = row_counts(layout, work.token_budget)
    is_sparse = a.is_sparse(layer)
    kept = a.layer_norms * rows * _norm_row(a, a.hidden_size, work)
    kept += _inputs(a, layout, work, layer, is_sparse=is_sparse)
    if a.is_recurrent(layer):
        kept += tokens * b * _mixed(a) // layout.tp
        return kept + _mlp_bytes(a, layout, work, is_sparse=is_sparse)
    heads, kv_heads = a.num_heads // layout.tp, max(1, a.num_kv_heads // layout.tp)
    # With fewer key/value heads than ranks Megatron gathers all ranks' product and takes this rank's heads.
    product = a.num_heads + 2 * a.num_kv_heads if layout.tp > a.num_kv_heads else heads + 2 * kv_heads
    if a.recurrent is not None:
        product += a.num_heads if layout.tp > a.num_kv_heads else heads
        kept += tokens * a.head_dim * heads * (4 + b)
    if a.latent is None:
        kept += _keys_and_values(
            a, layout, work, tokens, product=b * a.head_dim * product, head=c * a.head_dim * kv_heads
        )
    else:
        kept += rows * _latent_row(a, a.latent, work)
        kept += 2 * layout.cp * tokens * c * a.head_dim * heads
    kept += tokens * (2 * c * a.head_dim * heads + 4 * heads)
    if a.family.whole_qk_norm and layout.tp > 1:
        # A sum each, and x, which is inside the values' product if a rank has one group.
        is_inside = kv_heads == 1 and b == c and layout.cp == 1
        kept += tokens * (2 * 4 + (0 if is_inside else b * a.head_dim * (heads + kv_heads)))
    elif a.qk_norm or a.family.whole_qk_norm:
        kept += tokens * _qk_norm_token(a, heads, kv_heads, work)
    window = a.windows[layer] if a.windows else None
    if window and work.device == "cuda":  # copies of keys and values for each query head
        kept += 2 * layout.cp * tokens * c * a.head_dim * (heads - kv_heads)
    if a.family.has_sinks:
        # At most: longer heads, copies of keys and values, and masks of blocks that are not whole.
        copies = 1 + -(-(window or 0) // WINDOW_BLOCK)
        longer = 2 * SINK_SIZE * heads + 2 * layout.cp * (a.head_dim + SINK_SIZE) * kv_heads * copies
        kept += tokens * c * (longer + (min(WINDOW_BLOCK, tokens) + window if window else 0))
    return kept + _mlp_bytes(a, layout, work, is_sparse=is_sparse)


def _mlp_bytes(a: Architecture, layout: LayoutConfig, work: Work, *, is_sparse: bool) -> int:
    """Of a layer's MLP or experts, without the inputs of ``_inputs``."""
    b = work.dtype_bytes
    rows, tokens = row_counts(layout, work.token_budget)
    if a.experts and is_sparse:
        e = a.experts
        inputs = 0 if work.lora else a.hidden_size + e.intermediate_size
        # Of gpt-oss the sum with the bias, both clamped halves, and what Megatron's operations keep.
        halves = 3 if e.clamp is None else 7
        copied = (
            4 * a.hidden_size
            if e.float32_logits and b == 2 and not work.lora and not work.freeze_router
            else 0
        )
        shared = tokens * (2 if work.lora else 3) * b * e.shared_size // layout.tp
        if e.has_shared_gate:  # the output and the gate that it is multiplied by
            shared += rows * b * (a.hidden_size + 1)
        return shared + rows * (
            e.experts_per_token * b * (inputs + halves * e.intermediate_size) + 8 * e.num_experts + copied
        )
    return tokens * (4 if work.is_aligned else 2) * b * a.intermediate_size // layout.tp


def rule_bytes(a: Architecture, layout: LayoutConfig, work: Work) -> int:
    """What one gated delta net keeps while it is computed again for its gradient, float32, if sequences fill their chunks of C
    tokens: for each of T tokens and A / t heads, N numbers of a key and V of a value, 6 N + 8 V, within a chunk 5 C, the state
    2 N V / C, and 8 for what heads have one of; and 6 for each of D / t numbers that are convolved. 0 without such layers."""
    r = a.recurrent
    if r is None:
        return 0
    _, tokens = row_counts(layout, work.token_budget)
    of_head = 6 * r.key_dim + 8 * r.value_dim + 5 * CHUNK + 2 * r.key_dim * r.value_dim // CHUNK + 8
    return tokens * 4 * (r.value_heads * of_head + 6 * r.convolved) // layout.tp


def _projected(a: Architecture, layer: int) -> int:
    """Numbers per token in the input of the projection after attention, or after a gated delta net."""
    if a.is_recurrent(layer):
        assert a.recurrent is not None
        return a.recurrent.value_heads * a.recurrent.value_dim
    return a.value_dim * a.num_heads


def _inputs(a: Architecture, layout: LayoutConfig, work: Work, layer: int, *, is_sparse: bool) -> int:
    """The inputs of a layer's matrices, for the gradients of these or of their adapters: b H of ``rows`` for qkv and fc1,
    b D A / t and b I / t a token for proj and fc2. The MLP's are here for dense layers; experts read the output of the
    norm too."""
    b, (rows, tokens) = work.dtype_bytes, row_counts(layout, work.token_budget)
    sizes = {
        "qkv": rows * b * a.hidden_size,
        "proj": tokens * b * _projected(a, layer) // layout.tp,
        "fc1": rows * b * a.hidden_size,
        "fc2": 0 if is_sparse else tokens * b * a.intermediate_size // layout.tp,
    }
    if work.lora is None:
        return sum(sizes.values())
    targets = work.lora.targets
    return sum(sizes[target] for target in targets) + len(targets) * tokens * b * work.lora.rank


def _keys_and_values(
    a: Architecture, layout: LayoutConfig, work: Work, tokens: int, *, product: int, head: int
) -> int:
    """Rotated keys, c D K a token, and the values: inside the whole qkv product, b D (A + 2 K), or in a float32
    copy, c D K. ``product`` and ``head`` are b D (A + 2 K) and c D K.

    Under context parallelism both are gathered: 2 c D K for each of the micro-batch's tokens. The product is then
    kept only where a norm on CUDA keeps the keys inside it.
    """
    if layout.cp > 1:
        has_product = a.qk_norm and work.device == "cuda"
        return tokens * (2 * layout.cp * head + (product if has_product else 0))
    return tokens * (head + (product if work.dtype_bytes == work.attention_bytes else head))


def _latent_row(a: Architecture, latent: Latent, work: Work) -> int:
    """The norms of a row's short vectors, each with its output. On CUDA they are kept inside the product, whose rotated part
    is kept with them."""
    sizes = [size for size in (latent.query_rank, latent.rank) if size]
    kept = sum(_norm_row(a, size, work) + work.dtype_bytes * size for size in sizes)
    return kept + (work.dtype_bytes * a.rotary_size if work.device == "cuda" else 0)


def _norm_row(a: Architecture, size: int, work: Work) -> int:
    """RMSNorm of one row keeps x and 1 / rms, b size + 4, on CUDA. On CPU it keeps x / rms and 1 / rms in
    float32, 4 size + 4, and for a 2-byte dtype x in float32 too; beside adapters the weight is frozen, and of the two
    x alone is kept. A norm that multiplies by 1 + weight computes in float32 there, and keeps 4 size + 4."""
    if work.device == "cuda":
        return work.dtype_bytes * size + 4
    if a.family.centred_norms:
        return 4 * size + 4
    return (4 if work.dtype_bytes == 4 or work.lora else 8) * size + 4


def _qk_norm_token(a: Architecture, heads: int, kv_heads: int, work: Work) -> int:
    """Norms of queries and keys keep ``_norm_row`` per head; on CUDA the keys' x is free inside the qkv product."""
    kept_anyway = work.dtype_bytes if work.device == "cuda" else 0
    return (heads + kv_heads) * _norm_row(a, a.head_dim, work) - kv_heads * kept_anyway * a.head_dim


def logits_bytes(architecture: Architecture, layout: LayoutConfig, work: Work) -> int:
    """Greatest memory of the backward pass of the log-probs (``vocab_parallel.linear_logprobs``).

    A chunk of C tokens: on CPU logits and probabilities in float32, 8 C V / t, and in a 2-byte dtype the product
    before the logits, 2 C V / t; on CUDA the product alone, b C V / t, which its gradient overwrites. The weight's gradient
    is summed in float32, 4 V H / t, and rounded to a 2-byte dtype, 2 V H / t, on CUDA after the last chunk; a frozen one,
    beside adapters, has none. The hidden states' gradient is b T H. ``fp32_lm_head`` multiplies by a float32 copy of a 2-byte
    weight, 4 V H / t, and its product is in float32.
    """
    rows = padded_vocab_size(architecture.vocab_size, layout.tp) // layout.tp
    rounded = 2 if work.dtype_bytes == 2 else 0
    tokens = -(-work.token_budget // layout.cp)
    has_copy = work.fp32_lm_head and rounded > 0
    product = 0 if has_copy else rounded
    of_logit = (product or 4) if work.device == "cuda" else 8 + product
    chunk, weight = min(work.chunk_tokens, tokens) * rows * of_logit, rows * architecture.hidden_size
    copy = weight * 4 if has_copy else 0
    weight_gradient = weight * 4 if work.lora is None else 0
    rounding = weight * rounded if work.lora is None else 0
    at_once = max(chunk, rounding) if work.device == "cuda" else chunk + rounding
    return at_once + copy + weight_gradient + tokens * architecture.hidden_size * work.dtype_bytes
