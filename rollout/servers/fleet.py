"""The SGLang servers of one node: start, health, watch, and an end that leaves no process behind.

Each replica, or this node's share of a replica on several nodes, is a watched process (``watched_process``).
Requests (``client``), weights (``control``) and the choice of nodes and GPUs are not this file's concern.
"""

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollout.connections import own_answer
from rollout.servers.command import (
    INITIAL_WEIGHT_VERSION,
    NO_WEIGHT_VERSION,
    ServerSpec,
    server_command,
    server_environment,
)
from rollout.servers.ports import Ports, choose_ports
from rollout.servers.rank_meeting import RankMeeting
from rollout.servers.served import check_gpus_of, check_has_kernels, check_server_args, check_temporary_folder
from rollout.servers.share import ServerShare, on_one_machine
from rollout.servers.watched_process import (
    WatchedProcess,
    end_watched,
    how_it_ended,
    log_tail,
    server_pid,
    start_watched,
)

PORT_TAKEN = r"error while attempting to bind on address \('[^']*', {port}\b[^)]*\): address already in use"
"""What uvicorn says of its port, a hundred lines before the server's end. torch and ZMQ, which have other ports, end with the
same last words."""
HEALTH_POLL_S = 0.25
HEALTH_REQUEST_TIMEOUT_S = 60.0
RESTARTED_HEALTH_TIMEOUT_S = 5.0
"""Short, because the other servers must be watched meanwhile."""


class ServerDied(RuntimeError):
    """A server process ended while the run needed it."""


@dataclass(slots=True)
class _Replica:
    """This node's share of a replica."""

    share: ServerShare
    place: int
    """Its index among the shares of this node."""
    process: WatchedProcess
    ports: Ports
    log_file: Path
    meeting: RankMeeting
    life: int = 1
    """1, plus one for each restart."""
    pid: int | None = None
    """The server's (not its watchdog's), once seen."""
    starting_since: float | None = None
    """When it ended or was restarted. None: it has become healthy since, or has not ended."""
    silent_since: float | None = None
    """When it first did not answer."""

    @property
    def number(self) -> int:
        return self.share.replica

    @property
    def answers(self) -> bool:
        """Whether it answers HTTP; of a replica on several nodes, only the first does."""
        return self.share.node_rank == 0


class ServerFleet:
    """The replicas of one node, for one thread: ``start``, ``wait_healthy``, then ``poll`` now and then, and in any case
    ``stop``."""

    def __init__(
        self,
        spec: ServerSpec,
        log_dir: Path,
        shares: Sequence[ServerShare] | None = None,
        meeting_points: Mapping[int, str] | None = None,
    ) -> None:
        """shares: those of this node; None: every replica, from the first GPU on. meeting_points: for each
        replica on several nodes, HOST:PORT on its first node, where its ranks meet. Raises ValueError:
        ``server_args`` holds a flag of another field, or the config needs kernels that CPU lacks."""
        rollout = spec.config.rollout
        check_server_args(rollout)
        check_has_kernels(rollout, cuda=spec.cuda)
        self._spec, self._log_dir = spec, Path(log_dir)
        self._shares = on_one_machine(rollout.replicas, rollout.tp) if shares is None else list(shares)
        self._meeting_points = dict(meeting_points or {})
        self._replicas: list[_Replica] = []

    @property
    def urls(self) -> list[str]:
        """The address of each replica that answers from this node, in order; empty before ``start``."""
        return [self._replica_url(replica) for replica in self._replicas if replica.answers]

    def _replica_url(self, replica: _Replica) -> str:
        return f"http://{self._spec.host}:{replica.ports.http}"

    def start(self) -> None:
        """Start every share and return at once. Raises ValueError: too few GPUs, a taken port, a long TMPDIR,
        or a missing model folder; nothing was started."""
        model = self._spec.config.model.path.resolve()
        if not (model / "config.json").is_file():
            raise ValueError(f"{model} has no config.json; give the folder of a Hugging Face model")
        check_temporary_folder()
        if self._spec.cuda:
            check_gpus_of(self._shares, available=visible_gpus())
        first_port = self._spec.config.rollout.first_port
        all_ports = choose_ports([share.replica for share in self._shares], first_port, self._spec.host)
        self._log_dir.mkdir(parents=True, exist_ok=True)
        try:
            for place, (share, ports) in enumerate(zip(self._shares, all_ports, strict=True)):
                self._replicas.append(self._start_share(place, share, ports))
        except OSError:
            self.stop()
            raise

    def _start_share(
        self, place: int, share: ServerShare, ports: Ports, weight_version: int = INITIAL_WEIGHT_VERSION
    ) -> _Replica:
        meeting_point = self._meeting_points.get(share.replica)
        command = server_command(self._spec, share, ports, meeting_point, weight_version=weight_version)
        part = f".{share.node_rank}" if share.node_rank else ""
        log_file = self._log_dir / f"sglang-{share.replica}{part}.log"
        meeting = RankMeeting(share, meeting_point)
        environment = server_environment(self._spec, share, place) | meeting.environment
        process = start_watched(command, log_file=log_file, environment=environment)
        return _Replica(share, place, process, ports, log_file, meeting)

    def wait_healthy(
        self,
        timeout_s: float,
        on_progress: Callable[[str], None] = lambda message: None,
        *,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Return when every replica that answers from this node has generated a token, or when ``should_stop``
        returns True.

        Raises:
            ServerDied: a replica ended.
            TimeoutError: ``timeout_s`` passed; the message names the late replicas and the end of a log.
        """
        started = time.monotonic()
        waiting = [replica for replica in self._replicas if replica.answers]
        while waiting and not should_stop():
            self.poll()
            left_s = started + timeout_s - time.monotonic()
            request_timeout_s = min(HEALTH_REQUEST_TIMEOUT_S, max(left_s, 0.1))
            for replica in list(waiting):
                if _is_healthy(self._spec, replica.ports.http, request_timeout_s):
                    waiting.remove(replica)
                    took_s = time.monotonic() - started
                    on_progress(
                        f"SGLang replica {replica.number} is ready at {self._replica_url(replica)} after {took_s:.0f} s"
                    )
            if waiting and left_s <= 0:
                raise TimeoutError(
                    f"SGLang replicas {[replica.number for replica in waiting]} were not ready after {timeout_s:g} s; raise "
                    f"rollout.server_start_timeout_s if they only need longer; {self._log_end(waiting[0])}"
                )
            if waiting:
                time.sleep(HEALTH_POLL_S)

    def poll(self) -> None:
        """Look at every process once. Raises ServerDied: a replica ended."""
        for replica in self._replicas:
            replica.pid = replica.pid or server_pid(replica.process)
            if replica.process.poll() is not None:
                raise self._death_of(replica)

    def _death_of(self, replica: _Replica, *, is_restarted: bool = False) -> ServerDied:
        pid, ended = replica.pid or replica.process.pid, how_it_ended(replica.process.returncode)
        port = replica.ports.http
        if re.search(PORT_TAKEN.format(port=port), log_tail(replica.log_file, lines=1000)):
            fix = "" if is_restarted else ": start again"
            ended += f", because another process had taken its port {port}{fix}"
        return ServerDied(f"SGLang replica {replica.number} (pid {pid}) {ended}; {self._log_end(replica)}")

    def _log_end(self, replica: _Replica) -> str:
        return f"last lines of {replica.log_file}:\n{log_tail(replica.log_file, key=self._spec.key)}"

    def lives(self) -> dict[str, int]:
        """The address of each replica that answers and is not being restarted, with the number of its life."""
        ready = [r for r in self._replicas if r.answers and r.starting_since is None]
        return {self._replica_url(replica): replica.life for replica in ready}

    def note_ended(self) -> bool:
        """Whether a replica has ended. ``lives`` leaves it out from now on, and ``restart_ended`` restarts it."""
        ended = [replica for replica in self._replicas if replica.process.poll() is not None]
        for replica in ended:
            replica.starting_since = time.monotonic()
        return bool(ended)

    def restart_ended(self, most: int) -> list[ServerDied]:
        """Restart every replica that has ended, at its port and on its GPUs. Returns how they ended. The log
        of the previous life is kept beside the new one. Raises ServerDied: more than ``most`` have ended, or
        one of them has shares on other nodes."""
        deaths = []
        ended = [i for i, replica in enumerate(self._replicas) if replica.process.poll() is not None]
        for i in ended:
            replica = self._replicas[i]
            if len(ended) > most or replica.share.num_nodes > 1:
                raise self._death_of(replica)
            deaths.append(self._death_of(replica, is_restarted=True))
            end_watched([replica.process])  # what may be left of its group
            replica.meeting.close()
            replica.log_file.replace(replica.log_file.with_suffix(f".life{replica.life}.log"))
            started = self._start_share(replica.place, replica.share, replica.ports, NO_WEIGHT_VERSION)
            started.life, started.starting_since = replica.life + 1, time.monotonic()
            self._replicas[i] = started
        return deaths

    def kill_hung(self) -> list[int]:
        """Ask every healthy replica for its version, and kill those that have not answered for
        ``rollout.hang_timeout_s``: also a paused or busy replica answers this at once. SGLang's own watchdog ends a
        replica whose engine hangs. Returns the numbers of the killed replicas."""
        killed = []
        for replica in self._replicas:
            if not self._is_silent(replica):
                replica.silent_since = None
                continue
            replica.silent_since = replica.silent_since or time.monotonic()
            if time.monotonic() - replica.silent_since > self._spec.config.rollout.hang_timeout_s:
                end_watched([replica.process])
                killed.append(replica.number)
        return killed

    def _is_silent(self, replica: _Replica) -> bool:
        if replica.starting_since is not None or not replica.answers or replica.process.poll() is not None:
            return False
        return _version_of(self._spec, replica.ports.http, RESTARTED_HEALTH_TIMEOUT_S) is None

    def look_at_restarted(self) -> list[int]:
        """The numbers of the restarted replicas that have become healthy. Raises TimeoutError: one takes
        longer than ``rollout.server_start_timeout_s``."""
        limit_s, healthy = self._spec.config.rollout.server_start_timeout_s, []
        for replica in self._replicas:
            if replica.starting_since is None:
                continue
            if _is_healthy(self._spec, replica.ports.http, RESTARTED_HEALTH_TIMEOUT_S):
                replica.starting_since = None
                healthy.append(replica.number)
            elif time.monotonic() - replica.starting_since > limit_s:
                raise TimeoutError(
                    f"SGLang replica {replica.number} was restarted, and was not ready after {limit_s:g} s; "
                    f"{self._log_end(replica)}"
                )
        return healthy

    def stop(self) -> None:
        """End every replica by ``end_watched``. May be called twice. Raises RuntimeError: a process survived
        SIGKILL."""
        replicas, self._replicas = self._replicas, []
        try:
            end_watched([replica.process for replica in replicas])
        finally:
            for replica in replicas:
                replica.meeting.close()


def visible_gpus() -> int:
    """Number of GPUs that this process and its children may use; none is initialised."""
    import torch  # takes seconds; a check of a config never comes here

    return torch.cuda.device_count()


def _is_healthy(spec: ServerSpec, port: int, timeout_s: float) -> bool:
    """Whether the server generates. A server that still loads refuses the connection or answers 503."""
    if _version_of(spec, port, timeout_s) is None:
        return False
    path = "/health_generate"
    return own_answer(spec.host, port, path, key=spec.key, timeout_s=timeout_s) is not None


def _version_of(spec: ServerSpec, port: int, timeout_s: float) -> str | None:
    """The version of the server's weights. None: nothing answers, or another process does. That process may have taken
    the port while our server still loads; our server then ends, because it cannot listen."""
    answer = own_answer(spec.host, port, "/model_info", key=spec.key, timeout_s=timeout_s)
    try:
        info = {} if answer is None else json.loads(answer)
    except json.JSONDecodeError:
        return None
    if not isinstance(info, dict):
        return None
    is_ours = info.get("model_path") == str(spec.config.model.path.resolve())
    return info.get("weight_version") if is_ours else None
