"""Sampling by the SGLang servers."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from configs.errors import Contradiction
from configs.schema.base import (
    Count,
    NonNegativeInt,
    NonNegativeSeconds,
    PositiveInt,
    Schema,
    Seconds,
    Siblings,
    Temperature,
    Tokens,
    at_most,
)
from configs.schema.model import Dtype


class NoDynamicSampling(Schema):
    """Every sampled group is trained on, whether or not its siblings' rewards differ."""

    type: Literal["none"] = "none"


class ResampleGroups(Schema):
    """DAPO's dynamic sampling: a group whose siblings all score the same carries no signal, and is replaced
    by the group of a further prompt.

    A replacement starts as soon as a group turns out to carry no signal. A step uses as many prompts as it
    would in rounds, each of which samples the groups that the round before lacked. Prompts without signal are
    used up too.
    """

    type: Literal["resample"] = "resample"
    max_rounds: Annotated[int, Field(ge=2, strict=True)] = 4
    """Most rounds of sampling in one step, the first included. If groups are still missing then, the step's
    first groups without signal are taken."""
    compare: Literal["reward", "correct"] = "reward"
    """The quantity that must differ between siblings. ``reward``: the whole reward, so that the advantage is
    not zero. ``correct``: whether the response counts as right, as in the paper. A group whose siblings
    differ only in a model's score or in a penalty then carries no signal."""


class RouterConfig(Schema):
    """``sglang-router`` between the sample role and the servers. The sample role starts it on its own host.

    ``launch.peer_timeout_s`` does not apply to it: if a host vanishes during a request, the router gives it
    up after ``request_timeout_s``.
    """

    policy: Literal["round_robin", "cache_aware", "power_of_two", "random"] = "round_robin"
    """How the router chooses the server of a request. ``cache_aware`` sends requests with the same beginning to
    one server, as far as the load allows."""


Quantization = Literal["none", "fp8"]
Precision = Literal["bf16", "fp16", "int8", "int4", "int3", "int2", "fp8_e4m3", "fp8_e4m3_block"]
ROUNDED: dict[Precision, str] = {
    "bf16": "every weight to bfloat16",
    "fp16": "every weight to float16",
    "int8": "the layers' matrices to INT8, a scale per output channel",
    "int4": "the layers' matrices to INT4, a scale per 32 weights of a row",
    "int3": "the layers' matrices to INT3, a scale per 32 weights of a row",
    "int2": "the layers' matrices to INT2 (three values), a scale per 32 weights of a row",
    "fp8_e4m3": "the layers' matrices to FP8 (e4m3), a scale per matrix",
    "fp8_e4m3_block": "the layers' matrices to FP8 (e4m3), a scale per 128 x 128 block",
}
"""Descriptions of what the learner rounds before it sends."""

LATE_RETRIES = 1
"""Most retries of a request whose time ran out. Servers that hang are killed earlier, so most late requests
are slow ones, which will be slow again."""
MOST_KEPT = 4096
"""SGLang's ``--sampling-mask-max-tokens`` by default: the most ids that it returns for a token."""
StopText = Annotated[str, Field(min_length=1, max_length=60)]
"""As a pattern (``rollout/servers/answers.py``) it has at most the 256 bytes that SGLang takes."""

DynamicSampling = Annotated[NoDynamicSampling | ResampleGroups, Field(discriminator="type")]


class RolloutConfig(Schema):
    """The samples of a step, and the servers that make them."""

    dtype: Dtype = "bfloat16"
    """Precision of the served weights. The gap between the engines is smallest if it equals
    ``model.dtype``."""
    quantization: Quantization = "none"
    """SGLang's own quantization of the layers' matrices; embeddings, output head and norms stay as they are.

    fp8: SGLang rounds weights when they arrive, and activations in every pass, to FP8 (e4m3), with a scale
    for each output channel and each token. It needs CUDA with compute capability 8.9 or newer, and dense
    Qwen2 or Qwen3: SGLang cannot update other models that it serves in FP8, nor any model in its own INT8."""
    precision: Precision | None = None
    """Weight-only rounding, for a study of mismatch: the learner rounds what it sends, and the servers compute with
    the rounded numbers in ``dtype``, on any device. This has the error of quantised weights, but neither the speed of
    quantised kernels nor the error of rounded activations. None: weights are sent as they are.

    bf16, fp16: every weight. The others: the layers' matrices; embeddings, output head and norms stay as they are.
    int8: a scale for each output channel. int4, int3, int2: a scale for each 32 weights of a row. fp8_e4m3: a scale for each
    matrix. fp8_e4m3_block: a scale for each 128 x 128 block. With ``sglang_plugin`` these matrices are sent as their scales
    and a byte for each number."""
    prompts_per_step: Count = 32
    """Prompts of one step; the step has ``group_size`` responses to each."""
    group_size: Siblings = 8
    """Siblings sampled per prompt."""
    dynamic_sampling: DynamicSampling = NoDynamicSampling()
    """Whether groups whose responses all score the same are trained on, or replaced by new ones."""
    max_new_tokens: Tokens = 1024
    """Most tokens of a response; a longer one is cut off, and scored as it is."""
    stop: Annotated[tuple[StopText, ...], Field(max_length=32)] = ()
    """Texts such as ``</search>`` that also end a response: the first token that completes one of them is the last. It stays
    whole, so the response may run past the text by the rest of that token. Its tokens are those that were sampled: they are
    trained on, rewards read their text, and the finish reason is ``stop``. In an environment every turn ends there, and in an
    evaluation every response. The servers then load the tokenizer, and decode the newest tokens after each token that
    may complete a text."""
    temperature: Temperature = 1.0
    """Temperature of the softmax that training samples from. The learner computes its log-probs at the same
    one."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Training samples come from the fewest ids whose probabilities sum to top_p. With top_p, top_k or min_p the servers
    return each token's kept ids, and all log-probs and entropies of the learner are those of the softmax over them.
    It needs a finite top_k, without which SGLang returns no kept ids. Evaluations have their own ``evaluation.top_p`` and
    ``top_k``."""
    top_k: Annotated[int, Field(ge=-1, le=MOST_KEPT)] = -1
    """Training samples come from the top_k likeliest ids (2 to 4096). -1: all, the only choice without top_p and min_p."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Training samples come from the ids of at least min_p times the largest probability. It needs a finite top_k."""
    max_staleness: Annotated[NonNegativeInt, at_most(1000, "no policy learns from samples so old")] = 0
    """k: versions of the weights by which a token may lag behind the step that trains it. 0: sampling and
    training alternate. 1 and more: the groups of the next k steps are sampled while the learner trains. If an
    update interrupts a response, it continues under the new weights, and every token keeps the version and
    the log-prob that it was sampled with. The bound is strict, no group is dropped, and the order of the data
    stays the same."""
    drain_s: NonNegativeSeconds = 0.0
    """Longest wait for unfinished responses before an update of the weights interrupts them. An interrupted
    response costs one more prefill, and has tokens of several versions. For max_staleness of 1 or more."""
    replicas: Count = 1
    """Servers, each with a copy of the model."""
    router: RouterConfig | None = None
    """None: Tandem's client sends each group, as one request, to the replica with the fewest samples in
    flight. A router gets one request per sample, since it takes only one set of sampling parameters, and so
    one seed, per request."""
    tp: Count = 1
    """Tensor-parallel size of each replica."""
    first_port: int | None = Field(default=None, ge=1024, le=65000)
    """Replica i listens on first_port + 2 i. None: on free ports."""
    max_concurrency: Count = 512
    """Samples in flight over all replicas; a group larger than this is sent in parts."""
    request_timeout_s: Seconds = 600.0
    """Deadline of one generation, from the request to its last token. A late one is aborted and requested
    once more (with max_retries of 1 or more). Both attempts must fit into 0.9 of
    ``launch.collective_timeout_s``, for which the learner waits for samples. A server that makes no progress
    for half of the deadline, and at least 30 s, counts as hung: it is killed, and started again if
    max_server_restarts allows."""
    max_retries: NonNegativeInt = 3
    """Most retries of a request whose transport failed or whose time ran out; the metrics count each."""
    max_total_tokens: Annotated[PositiveInt, at_most(2**40, "no memory holds so many")] | None = None
    """Size of SGLang's KV pool in tokens; None leaves it to SGLang (on CPU: 65536)."""
    max_server_restarts: NonNegativeInt = 3
    """How often a server that has ended, or hangs, is started again, over all servers of a node and one
    attempt of the run. Meanwhile the run continues with the other servers, or waits if there is none. With a
    router, or if servers share the learner's devices or take several nodes, no server is started again, and the
    run ends with it."""
    max_sampler_restarts: NonNegativeInt = 3
    """How often the sample role is started again after its process has ended, over one attempt of the run. It
    continues from the learner's position in the data. A role that was never ready is not started again: it
    would fail again."""
    server_start_timeout_s: Seconds = 600.0
    """Deadline for one server to load the model and answer."""
    sglang_plugin: bool = True
    """Servers use Tandem's plugin (``rollout/sglang_plugin``): weights are received into the parameters, and
    their bytes are checked. On CPU one attention call serves many sequences, processes are forked, and a
    paused scheduler sleeps. ``false``: only SGLang's own code; probe prompts are then the only check of the
    weights."""
    weight_transfer: Literal["auto", "broadcast", "memory"] = "auto"
    """How the weights get to the servers. broadcast: by NCCL between GPUs, else by gloo, over any number of
    nodes. NCCL refuses GPUs that learner and servers share; weights then go by gloo through host memory.
    memory: the servers copy them out of the learner's memory, with Tandem's plugin; on one machine, or on each of several
    nodes that learner and servers share, if ``layout.pp`` is 1 and no server spans two of them. auto: memory on
    one machine without GPUs, on one machine whose GPUs both sides share, and on shared nodes as above; a broadcast elsewhere, and
    where a machine forbids a process to read another's memory."""
    server_args: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Further flags of ``sglang.launch_server``, without the dashes; ``true`` is a bare flag."""

    @property
    def packs(self) -> bool:
        """Whether rounded matrices are sent to the servers as their scales and a byte for each number.
        Without the plugin SGLang receives only numbers of ``dtype``."""
        return self.sglang_plugin and self.precision not in (None, "bf16", "fp16")

    @property
    def rounding(self) -> str | None:
        """A description of ``precision``, shown with the results of such a rollout."""
        if self.precision is None:
            return None
        what = f"weight-only: the learner rounds {ROUNDED[self.precision]}, and the servers compute in {self.dtype}"
        return f"{what}. Evaluations of the run are of the rounded weights; `tandem eval` of RUN/hf is of the learner's own"

    @property
    def hang_timeout_s(self) -> float:
        """Time without progress after which a server counts as hung."""
        return max(30.0, self.request_timeout_s / 2)

    @property
    def late_s(self) -> float:
        """Time after which a request is given up whose every attempt is late."""
        return (1 + min(LATE_RETRIES, self.max_retries)) * self.request_timeout_s

    @property
    def most_samples(self) -> int:
        """Most samples that are in flight or wait for a place."""
        return (1 + self.max_staleness) * self.prompts_per_step * self.group_size

    @property
    def server_flags(self) -> dict[str, str | int | float | bool]:
        """``server_args`` by the names of SGLang's flags, which have dashes."""
        return {name.replace("_", "-"): value for name, value in self.server_args.items()}

    @property
    def is_truncated(self) -> bool:
        """Whether training samples come from a part of the vocabulary."""
        return self.top_k != -1

    def _contradictions(self) -> Iterator[Contradiction]:
        if self.dynamic_sampling.type == "resample" and self.group_size == 1:
            yield Contradiction(
                ("dynamic_sampling.type", "group_size"),
                "dynamic_sampling.type=resample needs siblings that can differ, but group_size=1",
                "raise it, or use type: none",
            )
        if self.drain_s > 0 and not self.max_staleness:
            yield Contradiction(
                ("drain_s", "max_staleness"),
                f"drain_s={self.drain_s:g} waits for unfinished responses, and with max_staleness=0 there are none at an update",
                "remove it, or set max_staleness to 1 or more",
            )
        if self.quantization == "fp8" and self.dtype == "float32":
            yield Contradiction(
                ("quantization", "dtype"),
                "quantization=fp8 computes with activations of 2 bytes, but dtype=float32",
                "set dtype=bfloat16",
            )
        if self.weight_transfer == "memory" and not self.sglang_plugin:
            yield Contradiction(
                ("weight_transfer", "sglang_plugin"),
                "weight_transfer=memory needs Tandem's plugin in the servers, which sglang_plugin=false leaves out",
                "set weight_transfer=broadcast, or sglang_plugin=true",
            )
        if self.quantization != "none" and self.precision is not None:
            yield Contradiction(
                ("precision", "quantization"),
                f"precision={self.precision} would round weights that SGLang rounds again (quantization={self.quantization})",
                "set one of them",
            )
        if self.stop and self.router is not None:
            yield Contradiction(
                ("stop", "router"),
                "stop does not go with router: sglang-router 0.3.2 passes on only the fields that it knows, and drops the patterns of the "
                "texts",
                "remove one of them",
            )
        if self.top_k in (0, 1):
            yield Contradiction(
                ("top_k",),
                f"top_k={self.top_k} leaves no choice to learn from: every log-prob would be 0",
                "set top_k to 2 or more, or -1 for the full vocabulary",
            )
        for name, neutral in (("top_p", 1.0), ("min_p", 0.0)):
            if getattr(self, name) != neutral and self.top_k == -1:
                yield Contradiction(
                    (name, "top_k"),
                    f"{name}={getattr(self, name):g} samples from a truncated distribution while SGLang reports log-probs of the full one, "
                    f"and SGLang returns the kept ids only with a finite top_k",
                    f"set top_k, up to {MOST_KEPT}, or {name}: {neutral}",
                )
