"""How the SGLang servers sample."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from configs.errors import Contradiction
from configs.schema.base import (
    Count,
    NonNegativeInt,
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
    """Every sampled group is trained on, whether its siblings' rewards differ or not."""

    type: Literal["none"] = "none"


class ResampleGroups(Schema):
    """DAPO's dynamic sampling: groups whose siblings all score the same carry no signal, and further prompts
    are sampled in their place.

    Each round asks for as many prompts as groups are still missing. Prompts without signal are used up too.
    """

    type: Literal["resample"] = "resample"
    max_rounds: Annotated[int, Field(ge=2, strict=True)] = 4
    """Of sampling in one step, the first included. What is missing then is filled with the step's first
    groups without signal."""
    compare: Literal["reward", "correct"] = "reward"
    """What must differ between siblings. ``reward``: the whole reward, so that the advantage is not zero.
    ``correct``: whether the response counts as right, as in the paper; a group that differs only in a model's
    score or in a penalty then carries no signal."""


class RouterConfig(Schema):
    """``sglang-router`` between the sample role and the servers, started by that role on its host.

    It knows nothing of ``launch.peer_timeout_s``: a host that vanishes in the middle of a request is given up
    after ``request_timeout_s``.
    """

    policy: Literal["round_robin", "cache_aware", "power_of_two", "random"] = "round_robin"
    """How it chooses the server of a request. ``cache_aware`` sends what begins alike to one server, as far
    as the load allows."""


Quantization = Literal["none", "fp8", "fake_int8"]

DynamicSampling = Annotated[NoDynamicSampling | ResampleGroups, Field(discriminator="type")]


class RolloutConfig(Schema):
    """What is sampled in a step, how, and by which servers."""

    dtype: Dtype = "bfloat16"
    """Of the served weights; equal to ``model.dtype`` the gap between the engines is smallest."""
    quantization: Quantization = "none"
    """Of the layers' matrices in the servers; embeddings, output head and norms stay as they are.

    fp8: SGLang rounds weights as they arrive, and activations as they come, to FP8 (e4m3), with a scale for
    each output channel and each token. On CUDA, of compute capability 8.9 or newer, and for dense Qwen2 and
    Qwen3: the models that SGLang can update while it serves them in FP8. Its own INT8 cannot be updated at
    all.
    fake_int8: the learner rounds what it sends to the 255 values of INT8, with a scale for each output
    channel, and the servers compute with the rounded numbers in ``dtype``, on any device: the error of INT8
    weights, without INT8's speed and without that of rounded activations."""
    prompts_per_step: Count = 32
    """P, prompts of one step; the step has P times ``group_size`` responses."""
    group_size: Siblings = 8
    """G, siblings sampled per prompt."""
    dynamic_sampling: DynamicSampling = NoDynamicSampling()
    """Whether groups whose responses all score the same are trained on, or sampled anew."""
    max_new_tokens: Tokens = 1024
    """Most tokens of a response; a longer one is cut off, and scored as it is."""
    temperature: Temperature = 1.0
    """Of the softmax that training samples from; the learner computes its log-probs at the same one."""
    top_p: float = 1.0
    """1, since SGLang's log-probs ignore it: training with another is refused."""
    top_k: int = -1
    """-1, since SGLang's log-probs ignore it: training with another is refused."""
    min_p: float = 0.0
    """0, since SGLang's log-probs ignore it: training with another is refused."""
    max_staleness: Literal[0] = 0
    """Versions a token may lag behind the learner. Only the synchronous loop exists: 0."""
    replicas: Count = 1
    """Servers, each with a copy of the model."""
    router: RouterConfig | None = None
    """None: our own client sends each group, as one request, to the replica with the fewest samples in
    flight. A router gets each sample as a request of its own: it takes one set of sampling parameters, and so
    one seed, per request."""
    tp: Count = 1
    """SGLang's TP size of each replica."""
    first_port: int | None = Field(default=None, ge=1024, le=65000)
    """Replica i listens on first_port + 2 i; free ports are taken where this is not given."""
    max_concurrency: Count = 512
    """Samples in flight over all replicas; a group larger than this is sent in parts."""
    request_timeout_s: Seconds = 600.0
    """For one generation, from the request to its last token."""
    max_retries: NonNegativeInt = 3
    """Of a request whose transport failed; each is counted in the metrics."""
    max_total_tokens: Annotated[PositiveInt, at_most(2**40, "no memory holds so many")] | None = None
    """Size of SGLang's KV pool in tokens; None leaves it to SGLang (on CPU: 65536)."""
    server_start_timeout_s: Seconds = 600.0
    """For one server to load the model and answer."""
    sglang_plugin: bool = True
    """Of servers on CPU: attention over many sequences at once, processes that are forked, and a paused scheduler
    that sleeps (``rollout/sglang_plugin``). ``false``: SGLang's own code alone."""
    server_args: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Further flags of ``sglang.launch_server``, without the dashes; ``true`` is a bare flag."""

    @model_validator(mode="after")
    def _siblings_can_differ(self):
        if self.dynamic_sampling.type == "resample" and self.group_size == 1:
            raise Contradiction(
                ("dynamic_sampling.type", "group_size"),
                "dynamic_sampling.type=resample needs siblings that can differ, but group_size=1",
                "raise it, or use type: none",
            )
        return self

    @model_validator(mode="after")
    def _quantization_has_kernels(self):
        if self.quantization == "fp8" and self.dtype == "float32":
            raise Contradiction(
                ("quantization", "dtype"),
                "quantization=fp8 computes with activations of 2 bytes, but dtype=float32",
                "set dtype=bfloat16",
            )
        return self

    @model_validator(mode="after")
    def _sampling_is_unfiltered(self):
        for name, neutral in (("top_p", 1.0), ("top_k", -1), ("min_p", 0.0)):
            if getattr(self, name) != neutral:
                raise Contradiction(
                    (name,),
                    f"{name}={getattr(self, name)} would sample from a truncated distribution while SGLang reports "
                    "log-probs of the full one, so importance ratios would be wrong",
                    f"set {name}: {neutral}",
                )
        return self
