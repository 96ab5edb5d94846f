"""Publishing: learner weights -> servers, verified before sampling continues.

All ranks publish together. Each pipeline stage sends its own weights: its ranks gather one tensor after
another (over tensor- and expert-parallel ranks). The first rank of the stage, its sender, sends them to the
servers: by broadcasts in a process group, or from its own memory if all are on one machine. On several nodes that
both sides share, every node has a sender, from whose memory its own servers copy (``LaunchConfig.copies_by_node``). Only
what the learner gathers then crosses the network.

    rank 0             pause -> begin -> [ stage 0 ]------------------------------------> end -> versions -> resume -> probe
    sender of stage 1                      first bucket filled, waits for its turn -> [ stage 1 ] --^
    all other ranks                        gather with their sender, then wait for rank 0

    [ stage ]  announce all of it to the servers; for each bucket: queue it behind those in flight, hash it, while the
               stage gathers the next one; then send the hashes

The servers hash the received bytes, in the parameters if they were received there, and fail the announced
request if a hash differs from the sender's (``rollout/sglang_plugin``). Servers without the plugin get one
request per bucket, and check nothing; only the request that names the version waits for the answers to all
earlier ones.

Stages take turns. Servers load one bucket at a time anyway, and the turns fix which stage is the last: its
request names the version and flushes the cache. Only rank 0 opens and closes an update, and closes it after
all stages have reported what they sent. Each sender itself requests the servers to receive, because a server
that refuses takes no bucket, and only its answer says so.

Nothing samples between pause and resume. Responses that are unfinished then (``rollout.max_staleness``) give
up their place and their cache (SGLang's mode "retract") and continue under the new weights, with a recomputed
cache. So every token is of exactly the version that SGLang reports for it. A sender whose servers failed
still finishes the gathering, which its stage needs, and passes its turn on, marked as failed.

Any failure of the rollout side raises on all ranks together. If a server has ended, the update is repeated
for the servers that are left or, if there are none, for the first that is started again. A restarted server
gets the weights, and then samples, at the next update, or at once if no other server has the weights
(trainer/sampling.py). Any other failure ends the run, so no training sample comes from a partial update.

If the servers check every byte and the learner scores each step's samples, those of lag 0, by the weights
that sampled them, the samples themselves are the probe (``check_samples``), and ``publish`` sends no probe
prompt. With ``rollout.max_staleness`` it sends none either: a probe would wait behind all responses that the
update has interrupted.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TypeVar
from urllib.parse import urlsplit

import torch
from torch import Tensor

from configs.schema.launch import LaunchConfig
from configs.schema.rollout import RolloutConfig
from parallel.megatron.platform import device
from parallel.rank_objects import from_all_ranks, from_first_rank
from parallel.weights.transfer import Buffers, make_buckets, plan_transfer
from rollout.client import RolloutError
from rollout.records import Completion
from rollout.servers.control import Pending, SGLangControl
from tracing import span
from trainer.algorithm.mismatch import SampledGap
from trainer.batch.farthest_token import Measure
from trainer.engine_agreement import EngineAgreement
from trainer.file_system import SHARED_FOLDER_S
from trainer.learner import Learner
from trainer.ranks.interruption import StopRequested
from trainer.ranks.totals import answer_of_first_rank, on_first_rank
from trainer.stage_sender import StageSender, WeightSyncError, in_turn
from trainer.turns import OwnDevices
from trainer.weight_carriers import MEMORY, carrier_of

PROBE_PROMPT = [2 + i % 8 for i in range(12)]
"""Any tokens can compare two engines; ids this small exist in every vocabulary."""
PROBE_TOKENS = 4
LOOK_S = 0.1
"""Interval of the checks of what the serve roles announce."""
LOST_SERVER_S = 20.0
"""Time after a failure within which the serve role reports a server that has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentByRank:
    """One rank's part of a transfer; a sender's covers its whole stage."""

    bytes: int = 0
    failure: RolloutError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncResult:
    version: int
    bytes: int
    seconds: float
    max_logprob_gap: float | None
    """Nats, over the probe's tokens and all replicas; None without a probe."""
    servers: int = 1
    """Servers that have the weights now."""


T = TypeVar("T")
Lives = Callable[[], Mapping[str, int]]
ControlOf = Callable[[Sequence[str]], SGLangControl]


class WeightSync:
    """Sends weights to the servers. Every rank has one, and all call it together."""

    def __init__(
        self,
        learner: Learner,
        control: SGLangControl | None,
        rollout: RolloutConfig,
        launch: LaunchConfig,
        *,
        control_of: ControlOf,
        agreement: EngineAgreement | None = None,
        address: str = "127.0.0.1",
        turns: OwnDevices | None = None,
        lives: Lives | None = None,
        stop_requested: Callable[[], str | None] = lambda: None,
    ):
        """control: None on all ranks but the first.
        control_of: makes a control of the given servers, like ``control``, for a sender or for servers that were started again.
        agreement: the checks of probes and samples; None: only of probes, by the dtypes of both sides.
        address: this host's in the run. The servers reach a sender at it, and those of the same node answer at it.
        turns: None if the servers have their own devices.
        lives: the address of each server that can receive weights, with the number of its start; called only on rank 0. It
        raises a RolloutError if servers are not started any more. None, on all ranks, if the servers stay the same until the run
        ends.
        stop_requested: the reason to stop, or None; checked while servers start."""
        self._learner, self._control, self._rollout = learner, control, rollout
        self._turns = turns or OwnDevices()
        self._dtype = getattr(torch, rollout.dtype)
        self._agreement = agreement or EngineAgreement.of(rollout, learner.engine.dtype)
        self._samples_ahead = rollout.max_staleness > 0 and rollout.sglang_plugin
        self._has_met_servers = False
        self._plan = plan_transfer(
            learner.engine.export_plan(),
            dtype=self._dtype,
            device=device().type,
            precision=rollout.precision,
            packs=rollout.packs,
        )
        self._sender: StageSender | None = None
        self._is_by_node = False
        """Whether the sender is one of several, each for the servers of its node."""
        self._buffers = Buffers(device().type)
        self._launch, self._address = launch, address
        self._control_of = control_of
        self._lives, self._stop_reason = lives, stop_requested
        self._served: dict[str, int] = {}
        if lives is not None and control is not None:
            # A server that has ended since it was ready has life 0, which no server has when it is looked up.
            self._served = dict.fromkeys(control.urls, 0) | dict(lives())
        self._is_connected = False
        try:
            self._connect_all()
        except RolloutError:
            if lives is None:
                raise  # else ``take_over`` tries again, with the servers that exist by then

    def _connect_all(self) -> None:
        """``_connect``, whose failures are raised on all ranks."""
        failure = None
        try:
            self._connect()
        except RolloutError as error:
            failure = error
        failures = from_all_ranks(failure, self._learner.groups.pp_group)
        on_first_rank(lambda: _raise_first(failures))
        self._is_connected = True

    def _connect(self) -> None:
        """Create the senders to the servers of rank 0's control, all ranks together."""
        urls = from_first_rank(self._control.urls if self._control is not None else [])
        self._num_servers = len(urls)
        self._is_by_node = self._connect_by_node(urls)
        if self._is_by_node or not self._learner.groups.is_stage_first:
            return
        # Rank 0's control serves its own stage too.
        control = self._control or self._control_of(urls)
        with in_turn(self._learner.groups):
            try:
                self._sender = StageSender(
                    control,
                    carrier_of(self._rollout, self._launch, devices_are_shared=self._turns.are_shared),
                    self._launch.patience_s,
                    self._address,
                    stage=self._learner.groups.pp_rank,
                    in_one_request=self._rollout.sglang_plugin,
                )
            except BaseException:
                control.close()  # the next try creates a new one
                raise

    def _connect_by_node(self, urls: Sequence[str]) -> bool:
        """Make a sender of the first rank of each node, for the node's own servers. False, and no sender, if the run is not
        suited, or if a server cannot read the memory of its node's sender."""
        groups, nodes, rollout = self._learner.groups, self._launch.nodes, self._rollout
        if nodes is None or not self._launch.copies_by_node(
            rollout, stages=groups.pp_size, replicas=rollout.replicas, nodes=nodes.rollout
        ):
            return False
        self._meet_servers()
        is_first_of_node = groups.rank % (groups.world_size // nodes.learner) == 0
        here = [url for url in urls if is_first_of_node and urlsplit(url).hostname == self._address]
        problem = None
        if here:
            self._sender = StageSender(self._control_of(here), MEMORY, self._launch.patience_s)
            try:
                self._sender.try_memory()
            except RolloutError as error:
                problem = error
        everyone = from_all_ranks((self._address, here, problem))
        problem = next((problem for *_, problem in everyone if problem is not None), None)
        if problem is None:
            if sorted(url for _, here, _ in everyone for url in here) == sorted(urls):
                return True
            addresses = ", ".join(sorted({address for address, *_ in everyone}))
            servers = f"the servers answer at {', '.join(urls)}, and the learner's nodes have {addresses}"
            problem = WeightSyncError(
                f"{servers}; set launch.nodes.interface, so that both sides of a node use one address"
            )
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        if self._rollout.weight_transfer == "memory":
            fix = "where a process may not read another's memory, set rollout.weight_transfer=broadcast"
            raise WeightSyncError(f"rollout.weight_transfer=memory: {problem}; {fix}")
        if groups.rank == 0:
            print(f"weights go to the servers by gloo over the network, since {problem}", flush=True)
        return False

    def are_needed(self) -> bool:
        """Whether all servers that had the weights have ended, and others wait for the weights; called on the
        first rank only. ``send_again`` sends them."""
        if self._lives is None:
            return False
        lives = self._lives()
        return bool(lives) and not lives.items() & self._served.items()

    def _have_servers_changed(self, *, within_s: float = 0.0) -> bool:
        """Whether servers have ended or restarted since the transfer groups were made; rank 0 checks, for
        all."""
        lives = self._lives
        if lives is None:
            return False

        def look() -> bool | None:  # None is the cheapest answer
            deadline = time.monotonic() + within_s
            while lives() == self._served and time.monotonic() < deadline:
                self._wait_a_little()
            return lives() != self._served or None

        return answer_of_first_rank(look) is not None

    def _changes_after_failure(self) -> bool:
        shared_s = SHARED_FOLDER_S if self._launch.nodes is not None else 0.0
        return self._have_servers_changed(within_s=LOST_SERVER_S + shared_s)

    def _follow_servers(self) -> None:
        """If servers have ended or restarted, create new transfer groups with the servers that exist; all
        ranks together."""
        if self._have_servers_changed() or not self._is_connected:
            assert self._lives is not None
            self._is_connected = False
            if self._sender is not None:
                self._sender.abandon()
                self._sender = None
            on_first_rank(partial(self._meet_others, self._lives))
            self._has_met_servers = False
            self._connect_all()

    def _meet_others(self, lives: Lives) -> None:
        start_s = min(self._rollout.server_start_timeout_s, self._launch.patience_s)
        deadline = time.monotonic() + start_s
        while not lives() and time.monotonic() < deadline:
            self._wait_a_little()
        self._served = dict(lives())
        if not self._served:
            raise WeightSyncError(f"all servers have ended, and none was ready again after {start_s:.0f} s")
        self._servers.close()  # if no sender has it, since it could not take them over
        self._control = self._control_of(list(self._served))
        self._control.take_over()  # servers from before may be in the middle of an update

    def _wait_a_little(self) -> None:
        if (reason := self._stop_reason()) is not None:
            raise StopRequested(reason)
        time.sleep(LOOK_S)

    @property
    def _servers(self) -> SGLangControl:
        """The control, which only rank 0 has."""
        assert self._control is not None
        return self._control

    def publish(self) -> SyncResult:
        """Send the current weights as the next version, and check that the servers serve them.

        Raises RolloutError on all ranks together if a server or the transfer fails.
        """
        self._learner.version += 1
        return self.send_again()

    def send_again(self) -> SyncResult:
        """The same without a new version: a resumed run's servers hold the start model."""

        def send() -> SyncResult:
            self._follow_servers()
            return self._send_to_all()

        return self._again_where_servers_change(send)

    def take_over(self, *, sends: bool) -> None:
        """Prepare servers that may have outlived an earlier learner; all ranks together, before any sampling.

        Sends the current weights if ``sends``, if an update broke off, or if the servers hold another version.
        Until the weights are verified the servers stay paused: half an update never serves.
        """

        def pause_and_look() -> bool:
            """Whether an update broke off, or the servers hold another version than the learner."""
            broke_off = self._servers.take_over()
            return broke_off or set(self._servers.versions()) != {self._learner.version}

        def look_and_send() -> None:
            self._follow_servers()
            self._meet_servers()
            # Even if the weights are sent in any case: this pauses the servers.
            have_others = answer_of_first_rank(pause_and_look)
            if have_others or sends:
                self._send_to_all()
            else:
                on_first_rank(lambda: self._servers.resume())

        self._again_where_servers_change(look_and_send)

    def _meet_servers(self) -> None:
        """Once: refuse servers without this version of the plugin, if they should have it."""
        if self._rollout.sglang_plugin and not self._has_met_servers:
            on_first_rank(lambda: self._servers.require_plugin())
        self._has_met_servers = True

    def _again_where_servers_change(self, work: Callable[[], T]) -> T:
        """The result of ``work``, which is repeated if it fails and servers have ended or restarted."""
        while True:
            try:
                return work()
            except RolloutError:
                if not self._changes_after_failure():
                    raise

    def _send_to_all(self) -> SyncResult:
        started = time.perf_counter()
        self._turns.give_to_both()
        self._meet_servers()
        with span("servers paused", servers=self._num_servers):
            opening = self._control.open_update() if self._control is not None else None
            if self._is_by_node:  # the others' servers must not be asked to receive before
                on_first_rank(lambda: opening and opening.wait())
            with span("send") as sending:
                sent = self._send_stage(opening)
                sending.note(bytes=sent.bytes)
            with span("wait for stages"):
                # Rank 0's pipeline group has the senders of all stages.
                by_sender = from_all_ranks(sent, None if self._is_by_node else self._learner.groups.pp_group)
            on_first_rank(lambda: self._close_update(by_sender))
        self._turns.give_to_servers()
        is_probed = not (self._agreement.samples_are_probes or self._samples_ahead)
        gap = self.probe(self._rollout.temperature) if is_probed else None
        return SyncResult(
            version=self._learner.version,
            bytes=sum(sent.bytes for sent in (by_sender[:1] if self._is_by_node else by_sender)),
            seconds=time.perf_counter() - started,
            max_logprob_gap=gap,
            servers=self._num_servers,
        )

    def _send_stage(self, opening: Pending | None) -> SentByRank:
        """This rank's part of the transfer of its pipeline stage."""
        exported = self._learner.engine.export_hf()
        sent = SentByRank()
        if self._sender is not None:
            try:
                sent = self._send_as_sender(exported, opening)
            except RolloutError as failure:
                sent = SentByRank(failure=failure)
        for _ in exported:  # the gathering needs every rank of the stage, to its end
            pass
        return sent

    def _send_as_sender(self, exported: Iterator[tuple[str, Tensor]], opening: Pending | None) -> SentByRank:
        groups = self._learner.groups
        buckets = make_buckets(exported, self._plan, self._buffers)
        try:
            first = next(buckets)
            with in_turn(groups):
                # Only the last stage's request names the version (and flushes), so servers never report the new
                # version of an update that broke off.
                last_of_all = self._learner.version if groups.pp_rank == groups.pp_size - 1 else None
                size = self._sender.send(chain([first], buckets), self._plan, last_of_all, opening)
        finally:  # a run may continue without the servers that failed
            self._buffers.release()
        return SentByRank(bytes=size)

    def _close_update(self, by_sender: Sequence[SentByRank]) -> None:
        version = self._learner.version
        _raise_first([sent.failure for sent in by_sender])
        with span("verify"):
            served = self._servers.close_update()
        if set(served) != {version}:
            raise WeightSyncError(f"sent weight version {version}, but the servers report {served}")
        if not self._turns.are_shared:  # else it is not the servers' turn yet
            with span("resume"):
                self._servers.resume()

    def probe(self, temperature: float) -> float:
        """Largest |log p_server - log p_learner| over tokens that each replica samples for the probe prompt,
        in nats. Raises WeightSyncError as ``EngineAgreement.check_probe`` does."""

        def ask() -> list[Completion]:
            return self._servers.probe(PROBE_PROMPT, max_new_tokens=PROBE_TOKENS, temperature=temperature)

        completions = answer_of_first_rank(ask)
        with self._turns.learner_there():
            mine = self._learner.logprobs_of(PROBE_PROMPT, completions, temperature=temperature)
        theirs = [x for completion in completions for x in completion.rollout_logprobs.tolist()]
        ours = [x for row in mine for x in row]
        return self._agreement.check_probe(
            ours, theirs, version=self._learner.version, temperature=temperature
        )

    def check_samples(self, gap: SampledGap | None, farthest: Callable[[Measure], str]) -> None:
        """As ``EngineAgreement.check_samples``, of the samples of the version before this one."""
        self._agreement.check_samples(gap, farthest, version=self._learner.version - 1)

    @property
    def checks_gap(self) -> bool:
        """Whether a difference between the two engines beyond their rounding is an error."""
        return self._agreement.allowed is not None

    def prove(self, temperature: float) -> float:
        """``probe`` weights that no sample has used yet. If servers have ended since their update, the
        weights are sent again."""

        def send_and_probe() -> float:
            if self._have_servers_changed():
                self.send_again()
            return self.probe(temperature)

        return self._again_where_servers_change(send_and_probe)

    def close(self) -> None:
        """Leave the transfer groups, and close ``control``. Servers that have ended meanwhile are skipped."""
        if self._sender is not None:
            try:
                self._sender.close()
            except RolloutError:
                self._sender.abandon()
        if self._control is not None:
            self._control.close()


def _raise_first(failures: Sequence[RolloutError | None]) -> None:
    for failure in failures:
        if failure is not None:
            raise failure
