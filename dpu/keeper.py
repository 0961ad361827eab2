"""The keeper: the process of a daemon that does not die, and owns what outlives a worker.

::

    client --socket--> keeper --channel--> worker    (serves; killed at any instruction, the next one goes on)
                              --channel--> standby   (waits for ``adopt``)
                              --channel--> fork server (imported and compiled: both are forks of it)

Doorbells never come here: the worker peeks at its dup of the client's socket and consumes them by itself. At
any other message it says ``take``; the keeper alone then reads that message with its descriptors, records it,
forwards it and sends the reply, so a message is answered exactly once whatever happens to workers. Packets
are listed in ``_FROM_WORKER`` and in ``_adopt``; their form is in dpu/channel.py.

Use: ``Keeper(rpc_socket, ...).run()`` in the main thread; returns when asked to stop (SIGTERM, SIGINT, the
worker's ``stop``).
Parameters: see ``Keeper``. Limits: CLIENTS_MAX connections; see dpu/vfio_user/keeping.py for one of them.
Errors: EmuError when the RPC socket cannot be made or no worker ever comes up. A client's fault ends at most
its own connection; a worker's fault ends the worker. When each of ``crash_limit`` workers in a row dies soon and
while it serves the same client, that client is cut off and the others go on.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from dpu import killpoint, worker_process
from dpu.channel import ConfigStore, Packet, close_fds
from dpu.connection import Connection, ConnectionLost
from dpu.errors import EmuError
from dpu.listener import Listener, listen, private_directory
from dpu.vfio_user import keeping
from dpu.worker_process import WATCH_TICKS, Child, ForkServer, State, Worker

CLIENTS_MAX = 256

QUICK_DEATH_S = 5.0
"""A worker that dies sooner than this after it came up counts towards a crash loop."""

ADOPTION_S_MAX = 15.0
"""From ``go`` to ``up``; longer counts as hung."""

BACKLOG_BYTES_MAX = 64 << 20
"""Of messages that a client has not taken. DMA messages (dpu/dma.py) are 1 MiB at a time, but are given up and
followed by others."""

STOP_S_MAX = 2.0
"""How long a worker may take to end after SIGTERM."""

CHANGE_OVER = "change of code"
PAUSES_TOLD = 16

_BACKOFF_S = (0.0, 0.1, 0.2, 0.5, 1.0, 5.0, 30.0)
_READS_PER_TURN = 16
_PACKETS_PER_TURN = 64

log = logging.getLogger("dpud")


@dataclass
class Taken:
    """A message that has been read from a client and not yet been answered."""

    seq: int
    message: keeping.Message
    sent: bool = False


@dataclass(eq=False)
class Candidate:
    """Other code that is to take over (dpu/upgrade.py): its fork server, and its first worker when there is one."""

    command: Sequence[str]
    environment: Mapping[str, str]
    server: ForkServer
    worker: Worker | None = None


@dataclass(eq=False)
class Client:
    """One connection and what it has set up.

    ``wanted``: the worker has asked for the next message, and does not peek until that has been answered.
    ``cut_off``: workers died of it, so no other one is to take it up.
    """

    number: int
    listener: str
    connection: Connection
    tables: keeping.Tables = field(default_factory=keeping.Tables)
    seq: int = 0
    wanted: bool = False
    taken: Taken | None = None
    cut_off: bool = False

    @property
    def reading(self) -> bool:
        """Whether the keeper may read. A client that does not take its replies is not read either."""
        return self.wanted and not self.taken and self.connection.open and not self.connection.backlog

    def close(self) -> None:
        """Let go of everything."""
        self.connection.close()
        self.tables.close()
        if self.taken:
            close_fds(self.taken.message.fds)


class Keeper:
    """One daemon.

    :param rpc_socket: path of the JSON-RPC socket
    :param command: argv of the fork server (see worker_process.start)
    :param cpus: CPUs of the pollers
    :param environment: environment of workers
    :param watchdog_s: seconds without a heartbeat until a worker is killed; 0: never
    :param standby: keep a second worker ready
    :param crash_limit: quick deaths in a row until the keeper gives up on workers; 0: never
    :param on_ready: called once, when the first worker is up
    :param config: what the first worker finds as the stored configuration (see dpu/startup.py)
    :raises EmuError: the RPC socket cannot be made
    """

    def __init__(
        self,
        rpc_socket: str,
        command: Sequence[str],
        *,
        cpus: Sequence[int],
        environment: Mapping[str, str],
        watchdog_s: float = 3.0,
        standby: bool = True,
        crash_limit: int = 5,
        on_ready: Callable[[], None] = lambda: None,
        config: bytes = b"",
    ) -> None:
        self._command = list(command)
        self._cpus = list(cpus)
        self._environment = dict(environment)
        self._watchdog_s = watchdog_s
        self._keep_standby = standby
        self._crash_limit = crash_limit
        self._on_ready: Callable[[], None] | None = on_ready

        self._selector = selectors.DefaultSelector()
        self._serving: Worker | None = None
        self._standby: Worker | None = None
        self._forks: ForkServer | None = None
        self._candidate: Candidate | None = None
        self._before: tuple[list[str], dict[str, str]] | None = None  # while other code has not served yet
        self._pauses: list[dict[str, object]] = []
        self._spawned = 0
        self._generation = 0
        self._quick_deaths = 0
        self._suspects: list[int] = []  # clients that each of them was busy with
        self._failed_starts = 0
        self._spawn_at_s: float | None = 0.0
        self._tick_at_s = 0.0
        self._death: tuple[int, str, float] | None = None
        self.broken = False
        self._stopping = False
        self._failure = ""

        self._clients: dict[int, Client] = {}
        self._next_client = 1
        self._listeners: dict[str, Listener] = {}
        self._stash: dict[str, int] = {}
        try:
            self._rpc = listen(rpc_socket)
        except OSError as error:
            raise EmuError(
                f"cannot listen at {rpc_socket}: {error.strerror or error}",
                "end the other dpud or name another socket with -r"
                if error.errno == errno.EADDRINUSE
                else "name another socket with -r, in a directory that is there and yours",
            ) from error
        self._config = ConfigStore.create()
        if config:
            ConfigStore(self._config).commit(config)
        # Closed for a moment when descriptors run out, so that a connection can be taken and refused.
        self._spare_fd = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)

    # ------------------------------------------------------------------------------------------- main loop

    def run(self) -> None:
        """Serve until asked to stop.

        :raises EmuError: no worker ever came up, or one cannot do what it was started for
        """
        try:
            with self._signals():
                while not self._stopping:
                    self._turn()
        finally:
            self._shutdown()
        if self._failure:
            raise EmuError(self._failure, "mend the file given with -c; the lines above say more")

    def stop(self) -> None:
        """Leave ``run`` after the current turn."""
        self._stopping = True

    def _turn(self) -> None:
        timers = [self._tick_at_s] + ([self._spawn_at_s] if self._spawn_at_s is not None else [])
        for key, events in self._selector.select(max(0.0, min(timers) - time.monotonic())):
            now = self._selector.get_map().get(key.fd)
            if now is not None and now.data is key.data:  # else an earlier event of this turn has ended it
                key.data(events)
        self._timers(time.monotonic())

    def _timers(self, now_s: float) -> None:
        if now_s >= self._tick_at_s:
            self._tick_at_s = now_s + (self._watchdog_s or QUICK_DEATH_S) / WATCH_TICKS
            self._watch_worker(now_s)
        if self._spawn_at_s is not None and now_s >= self._spawn_at_s:
            self._spawn_at_s = None
            self._spawn()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT end the loop; a byte through the wake-up descriptor ends the select."""
        reading, writing = socket.socketpair()
        reading.setblocking(False)
        writing.setblocking(False)
        self._selector.register(reading, selectors.EVENT_READ, lambda _events: reading.recv(64))
        old_fd = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        old = {s: signal.signal(s, lambda *_: self.stop()) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(old_fd)
            self._selector.unregister(reading)
            reading.close()
            writing.close()

    def _interest(self, fd: int, events: int, callback: Callable[[int], None]) -> None:
        """Select for ``events`` (0: not at all) on ``fd``."""
        key = self._selector.get_map().get(fd)
        if key is None:
            if events:
                self._selector.register(fd, events, callback)
        elif not events:
            self._selector.unregister(fd)
        elif key.events != events:
            self._selector.modify(fd, events, key.data)

    def _no_interest(self, fd: int) -> None:
        # Always before a close: dups in workers keep the description, and its events, alive.
        self._interest(fd, 0, lambda _events: None)

    def _shutdown(self) -> None:
        for listener in [self._rpc, *self._listeners.values()]:
            listener.close()
        other = self._candidate
        ours = [self._forks, self._serving, self._standby, *([other.server, other.worker] if other else [])]
        children: list[Child] = [child for child in ours if child]
        for child in children:
            child.kill(number=signal.SIGTERM)
        deadline_s = time.monotonic() + STOP_S_MAX
        for child in children:
            if not child.ended(deadline_s - time.monotonic()):
                child.kill()
            child.wait()
            child.close()
        for client in self._clients.values():
            client.close()
        shutil.rmtree(private_directory(self._rpc.path), ignore_errors=True)
        close_fds([*self._stash.values(), self._config, self._spare_fd])
        self._selector.close()

    # ------------------------------------------------------------------------------------- life of a worker

    def _spawn(self) -> None:
        """Have a worker forked; it serves or stands by, as needed when it is ready."""
        self._spawned += 1
        try:
            if self._forks is None:
                self._forks = worker_process.start(self._command, self._environment)
                self._watch_server(self._forks)
            self._forks.ask(armed=self._spawned <= int(self._environment.get(killpoint.GENERATIONS_VARIABLE, "1")))
        except OSError as error:
            log.error("cannot start a worker: %s", error)
            self._start_failed()

    def _watch_server(self, server: ForkServer) -> None:
        self._selector.register(server.pidfd, selectors.EVENT_READ, partial(self._on_fork_server_exit, server))
        self._watch_channel(server, partial(self._on_forked, server))

    def _on_forked(self, server: ForkServer, _events: int) -> None:
        """A fork server answers: there is a worker."""
        try:
            packet = server.channel.recv(blocking=False)
            if packet is None:  # it has ended, which its pidfd tells
                self._no_interest(server.channel.fileno())
                return
            with contextlib.closing(packet):
                worker = server.worker(packet)
        except (ValueError, LookupError, TypeError, ProcessLookupError) as error:
            log.error("the fork server sent a bad packet: %s: %s", type(error).__name__, error)
            server.kill("keeper: bad packet")
            return
        if server is self._forks:
            self._standby = worker
        elif self._candidate is not None and server is self._candidate.server:
            self._candidate.worker = worker
        else:  # it has been given up meanwhile
            worker.kill("keeper: replaced")
        if self.broken:
            worker.kill("keeper: crash loop")
            server.kill("keeper: crash loop")
        self._selector.register(worker.pidfd, selectors.EVENT_READ, partial(self._on_exit, worker))
        self._watch_channel(worker, partial(self._on_channel, worker))

    def _on_fork_server_exit(self, server: ForkServer, _events: int) -> None:
        """It has ended: what it answered still counts, the next worker needs a new one."""
        with contextlib.suppress(BlockingIOError):  # a fork that has just begun holds its end open
            self._on_forked(server, selectors.EVENT_READ)
        how = server.wait()
        self._no_interest(server.pidfd)
        self._no_interest(server.channel.fileno())
        if server is self._forks:
            self._forks = None
            log.warning("the fork server %d died (%s)", server.pid, how)
            if server.busy:
                self._start_failed()
        elif self._candidate is not None and server is self._candidate.server:
            self._give_up_candidate(f"its fork server ended ({how}); its errors are in dpud's log")
        server.close()

    @property
    def _expecting(self) -> bool:
        """Whether a worker is on its way, or stands by."""
        return self._standby is not None or self._spawn_at_s is not None or bool(self._forks and self._forks.busy)

    def _promote(self) -> None:
        """Let the standby serve, as soon as it is ready and nobody serves."""
        worker = self._standby
        if self._serving is None and not self.broken and worker is not None and worker.state is State.READY:
            self._serving, self._standby = worker, None
            self._adopt(worker)

    def _adopt(self, worker: Worker) -> None:
        """Hand over everything; after ``go`` the worker serves."""
        self._generation += 1
        worker.enter(State.ADOPTED)
        fds = [self._rpc.sock.fileno(), self._config]
        self._send(worker, "adopt", fds=fds, generation=self._generation, cpus=self._cpus)
        for key, fd in self._stash.items():
            self._send(worker, "fd", fds=[fd], key=key)
        for key, listener in self._listeners.items():
            self._send(worker, "listener", key=key, path=listener.path)
        for client in self._clients.values():
            self._introduce(worker, client)
        self._send(worker, "go")
        for client in self._clients.values():
            if client.taken:
                self._forward(client, client.taken)
            if not client.connection.open:
                self._send(worker, "gone", client=client.number)

    def _introduce(self, worker: Worker, client: Client) -> None:
        """Tell of a connection and what it has set up; ``raw`` is its VERSION message, b"" before that.

        ``taking``: the keeper is reading the next message, so the socket is not to be peeked at before that
        message has come and been answered. A take of which nothing has been read yet is forgotten instead.
        """
        if not client.taken and not client.connection.partial:
            client.wanted = False
            self._watch(client)
        about = partial(self._send, worker, client=client.number)
        about(
            "client",
            raw=client.tables.version,
            fds=[client.connection.fileno()],
            listener=client.listener,
            taking=client.wanted or client.taken is not None,
            cut_off=client.cut_off,
        )
        for region in client.tables.regions:
            about("dma", fds=[] if region.fd is None else [region.fd], **region.numbers())
        for index, start, fds in client.tables.irq_ranges():
            about("irq", fds=fds, index=index, start=start)

    def _on_exit(self, worker: Worker, _events: int) -> None:
        """The process has ended: what it sent still counts, then the next one takes over."""
        how = worker.wait()
        ended_s = worker.ended_s or time.monotonic()
        self._receive(worker, None)
        self._no_interest(worker.pidfd)
        if worker.channel_open:
            self._no_interest(worker.channel.fileno())
        suspects = worker.health.suspects(worker.stuck)
        worker.close()
        if self._candidate is not None and worker is self._candidate.worker:
            self._candidate.worker = None
            return self._give_up_candidate(f"its worker ended ({how}); its errors are in dpud's log")
        if worker is not self._serving and worker is not self._standby:  # of code that was replaced
            return None
        if worker is not self._serving:
            self._standby = None
            log.warning("worker %d died (%s) before it served", worker.pid, how)
            return self._start_failed()
        self._serving = None
        if self._candidate is not None:  # nobody waits for it any more
            self._give_up_candidate("the worker that asked for it has ended")
        if self._before is not None and worker.state is State.ADOPTED:
            self._go_back()
        if self._death is None:
            self._death = (worker.pid, how, ended_s)
        else:  # the pause that it was to end goes on
            log.warning("worker %d died (%s) before it served", worker.pid, how)
        if worker.verdict != CHANGE_OVER:
            self._count_death(worker.state is State.UP and ended_s - worker.since_s >= QUICK_DEATH_S, suspects)
        if not self.broken:
            self._promote()
            if self._serving is None and not self._expecting:
                self._spawn_after(self._quick_deaths - 1)
        return None

    def _start_failed(self) -> None:
        """A worker ended, or could not be started, before it served."""
        self._failed_starts += 1
        if self._serving is None:
            self._count_death(False)
        if not self.broken:
            self._spawn_after(self._failed_starts)

    def _spawn_after(self, failures: int) -> None:
        self._spawn_at_s = time.monotonic() + _BACKOFF_S[max(0, min(failures, len(_BACKOFF_S) - 1))]

    def _count_death(self, lived_long: bool, suspects: Sequence[int] = ()) -> None:
        self._quick_deaths = 0 if lived_long else self._quick_deaths + 1
        others = suspects if self._quick_deaths <= 1 else self._suspects
        self._suspects = [number for number in suspects if number in others]
        if not self._crash_limit or self._quick_deaths < self._crash_limit or self.broken:
            return
        if self._on_ready is not None:
            raise EmuError(f"no worker came up in {self._quick_deaths} tries", "its errors are in the log above")
        guilty = next((client for number in self._suspects if (client := self._clients.get(number))), None)
        if guilty is None or guilty.cut_off:
            self._break()
        else:
            self._cut_off(guilty)

    def _cut_off(self, client: Client) -> None:
        """End the connection of a client that workers die of; no worker takes it up again."""
        log.critical(
            "client %d of %s is cut off: %d workers in a row died while they served it. The others go on. Find the "
            "cause above",
            client.number,
            client.listener,
            self._quick_deaths,
        )
        client.cut_off = True
        self._quick_deaths = 0
        if client.taken:
            close_fds(client.taken.message.fds)
            client.taken = None
        if client.connection.open:
            self._lost(client, "workers died of it")

    # ------------------------------------------------------------------------------------------- other code

    def _prepare(self, worker: Worker, packet: Packet) -> None:
        """Start other code beside the one that serves; answered when its worker is ready, or never will be."""
        if self._candidate is not None:
            self._send(worker, "listening", key="candidate", error="another upgrade is under way")
            return
        command = [str(word) for word in packet.fields["command"]]
        environment = {**self._environment, **packet.fields["environment"]}
        try:
            server = worker_process.start(command, environment)
        except OSError as error:
            self._send(worker, "listening", key="candidate", error=str(error))
            return
        self._candidate = Candidate(command, environment, server)
        self._watch_server(server)
        try:
            server.ask(armed=False)
        except OSError as error:
            self._give_up_candidate(str(error))

    def _give_up_candidate(self, reason: str) -> None:
        other, self._candidate = self._candidate, None
        assert other is not None
        log.error("other code does not take over: %s", reason)
        other.server.kill("keeper: replaced")
        if other.worker is not None:
            other.worker.kill("keeper: replaced")
        if self._serving is not None:
            self._send(self._serving, "listening", key="candidate", error=reason)

    def _change_over(self, worker: Worker, _packet: Packet) -> None:
        """The prepared worker is the standby from now on, and the one that serves ends."""
        other, self._candidate = self._candidate, None
        if other is None or other.worker is None or other.worker.state is not State.READY:
            raise ValueError("a change-over without a worker to change to")
        self._before = self._command, self._environment
        self._command, self._environment = list(other.command), dict(other.environment)
        for child in (self._forks, self._standby):
            if child is not None:
                child.kill("keeper: replaced")
        self._forks, self._standby, self._spawn_at_s = other.server, other.worker, None
        worker.kill(CHANGE_OVER)

    def _go_back(self) -> None:
        """The other code cannot serve: the one that was there before goes on."""
        assert self._before is not None
        log.error("the other code ended before it served: going back to the one before")
        (self._command, self._environment), self._before = self._before, None
        for child in (self._forks, self._standby):
            if child is not None:
                child.kill("keeper: replaced")
        self._forks = self._standby = None

    def _watch_worker(self, now_s: float) -> None:
        worker = self._serving
        if worker is None or not self._watchdog_s:
            return
        if worker.state is State.ADOPTED and now_s - worker.since_s > ADOPTION_S_MAX:
            worker.kill("watchdog: adoption")
        elif worker.state is State.UP:
            stuck = worker.watchdog.stuck(worker.health.snapshot())
            if stuck is not None:
                worker.stuck = stuck
                worker.kill("watchdog: control" if stuck == 0 else f"watchdog: poller {stuck - 1}")

    # -------------------------------------------------------------------------------- channel to the worker

    def _send(self, worker: Worker, op: str, raw: bytes = b"", fds: Sequence[int] = (), **fields: object) -> None:
        if not worker.channel_open:
            return
        try:
            worker.channel.send(op, raw=raw, fds=fds, **fields)
        except ConnectionError:  # it has died: its end of file follows
            return
        except OSError as error:  # a packet that is missing would leave it astray
            log.error("cannot send %s to worker %d: %s", op, worker.pid, error)
            worker.kill("keeper: lost packet")
            return
        self._watch_channel(worker, partial(self._on_channel, worker))

    def _watch_channel(self, child: Child, callback: Callable[[int], None]) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if child.channel.backlog else 0)
        self._interest(child.channel.fileno(), events, callback)

    def _on_channel(self, worker: Worker, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            with contextlib.suppress(OSError):
                worker.channel.flush()
            self._watch_channel(worker, partial(self._on_channel, worker))
        if events & selectors.EVENT_READ:
            self._receive(worker, _PACKETS_PER_TURN)

    def _receive(self, worker: Worker, packets: int | None) -> None:
        """Handle up to ``packets`` packets (None: all); a worker that talks nonsense is killed."""
        while worker.channel_open and packets != 0:
            packets = None if packets is None else packets - 1
            try:
                packet = worker.channel.recv(blocking=False)
                if packet is None:
                    return self._end_of_file(worker)
                self._on_packet(worker, packet)
            except BlockingIOError:
                return None
            except (ValueError, LookupError, TypeError) as error:
                log.error("worker %d sent a bad packet: %s: %s", worker.pid, type(error).__name__, error)
                worker.kill("keeper: bad packet")
        return None

    def _end_of_file(self, worker: Worker) -> None:
        """The worker is dead or as good as dead; its pidfd tells when."""
        worker.ended_s = time.monotonic()
        worker.channel_open = False
        self._no_interest(worker.channel.fileno())
        worker.kill()

    def _on_packet(self, worker: Worker, packet: Packet) -> None:
        try:
            if packet.op == "ready" and worker.state is State.STARTING:
                worker.enter(State.READY)
                self._promote()
                if self._candidate is not None and worker is self._candidate.worker and self._serving is not None:
                    self._send(self._serving, "listening", key="candidate", error="")
            elif worker is self._serving:
                _FROM_WORKER[packet.op](self, worker, packet)
            else:
                raise ValueError(f"{packet.op!r} from a worker in state {worker.state.name}")
        finally:
            packet.close()  # what is kept has been taken out of its list

    def _up(self, worker: Worker, _packet: Packet) -> None:
        worker.enter(State.UP)
        self._failed_starts = 0
        if self._death is not None:
            pid, how, ended_s = self._death
            pause_ms = (worker.since_s - ended_s) * 1000
            log.warning("worker %d died (%s), %d serves after %.1f ms", pid, how, worker.pid, pause_ms)
            self._pauses = [*self._pauses[1 - PAUSES_TOLD :], self._pause(how, pause_ms)]
            self._death = None
        self._before = None
        self._send(worker, "pause", pauses=self._pauses)
        if self._on_ready is not None:
            on_ready, self._on_ready = self._on_ready, None
            on_ready()
        if self._keep_standby and not self._expecting:
            # Not before: it would compete with the one that the guests wait for.
            self._spawn_after(0)

    def _pause(self, why: str, pause_ms: float) -> dict[str, object]:
        return {"generation": self._generation, "why": why, "pause_ms": round(pause_ms, 3)}

    def _stash_fd(self, _worker: Worker, packet: Packet) -> None:
        key = str(packet.fields["key"])
        fd = packet.fds.pop()
        close_fds([self._stash.pop(key)] if key in self._stash else [])
        self._stash[key] = fd

    def _unstash_fd(self, _worker: Worker, packet: Packet) -> None:
        fd = self._stash.pop(str(packet.fields["key"]), None)
        close_fds([] if fd is None else [fd])

    def _listen(self, worker: Worker, packet: Packet) -> None:
        key, path = str(packet.fields["key"]), str(packet.fields["path"])
        error = ""
        try:
            if key in self._listeners:
                raise OSError(errno.EEXIST, "the listener exists")
            listener = self._listeners[key] = listen(path)
            self._selector.register(listener.sock, selectors.EVENT_READ, partial(self._on_accept, key))
        except OSError as failure:
            error = failure.strerror or str(failure)
        self._send(worker, "listening", key=key, error=error)

    def _unlisten(self, worker: Worker, packet: Packet) -> None:
        key = str(packet.fields["key"])
        listener = self._listeners.pop(key, None)
        if listener is not None:
            self._no_interest(listener.sock.fileno())
            listener.close()
        self._send(worker, "listening", key=key, error="" if listener else "no such listener")

    def _take(self, _worker: Worker, packet: Packet) -> None:
        client = self._clients.get(packet.fields["client"])
        if client is not None:
            client.wanted = True
            self._on_client(client, selectors.EVENT_READ)

    def _reply(self, _worker: Worker, packet: Packet) -> None:
        client = self._clients.get(packet.fields["client"])
        taken = client.taken if client else None
        if client is None or taken is None or taken.seq != packet.fields["seq"]:
            return
        client.taken = None
        if keeping.failed(packet.raw):
            close_fds(taken.message.fds)
        else:
            client.tables.commit(taken.message)
        fds = list(packet.fds)
        packet.fds.clear()
        self._answer(client, packet.raw, fds)

    def _send_raw(self, _worker: Worker, packet: Packet) -> None:
        client = self._clients.get(packet.fields["client"])
        if client is not None and client.connection.open:
            if client.connection.backlog_bytes > BACKLOG_BYTES_MAX:
                self._lost(client, "it does not read what it is sent")
            else:
                self._answer(client, packet.raw)

    def _drop(self, _worker: Worker, packet: Packet) -> None:
        client = self._clients.get(packet.fields["client"])
        if client is not None and client.connection.open:
            self._lost(client, str(packet.fields.get("reason", "dropped")))

    def _forget(self, _worker: Worker, packet: Packet) -> None:
        client = self._clients.get(packet.fields["client"])
        if client is not None:
            self._remove(client)

    def _loading(self, worker: Worker, _packet: Packet) -> None:
        worker.enter(State.ADOPTED)

    def _stop(self, _worker: Worker, packet: Packet) -> None:
        self._failure = str(packet.fields.get("failed", ""))
        self.stop()

    # --------------------------------------------------------------------------------------------- clients

    def _on_accept(self, key: str, _events: int) -> None:
        sock = self._accept(self._listeners[key].sock)
        if sock is None:
            return
        if self.broken or len(self._clients) >= CLIENTS_MAX:
            log.warning("refused a connection at %s", self._listeners[key].path)
            sock.close()
            return
        client = Client(self._next_client, key, Connection(sock))
        self._next_client += 1
        self._clients[client.number] = client
        if self._serving is not None:
            self._introduce(self._serving, client)

    def _accept(self, listening: socket.socket) -> socket.socket | None:
        """A connection, or None; without descriptors left it is taken and closed, or it would spin us."""
        try:
            return listening.accept()[0]
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                log.error("out of file descriptors: refused a connection")
                os.close(self._spare_fd)
                with contextlib.suppress(OSError):
                    listening.accept()[0].close()
                self._spare_fd = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
            return None

    def _watch(self, client: Client) -> None:
        """Select for what the client's state allows."""
        if client.connection.open:
            events = selectors.EVENT_READ if client.reading else 0
            events |= selectors.EVENT_WRITE if client.connection.backlog else 0
            self._interest(client.connection.fileno(), events, partial(self._on_client, client))

    def _on_client(self, client: Client, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                client.connection.flush()
            for _ in range(_READS_PER_TURN):
                if not client.reading:
                    break
                message = client.connection.read()
                if message is not None:
                    self._on_message(client, message)
        except BlockingIOError:
            pass
        except ConnectionLost as error:
            self._lost(client, str(error))
        self._watch(client)

    def _on_message(self, client: Client, message: keeping.Message) -> None:
        error_no = keeping.refusal(message) or (errno.ENOSPC if client.tables.full(message) else 0)
        if error_no or self.broken:
            close_fds(message.fds)
            raw = message.raw
            self._answer(client, keeping.error_reply(raw, error_no) if error_no else keeping.dead_reply(raw))
            return
        client.seq += 1
        client.wanted = False
        client.taken = Taken(client.seq, message)
        self._forward(client, client.taken)

    def _forward(self, client: Client, taken: Taken) -> None:
        """Give a message to the serving worker; ``replayed``: one before it may have carried it out."""
        if self._serving is not None:
            tell = partial(self._send, self._serving, "message", taken.message.raw, taken.message.fds)
            tell(client=client.number, seq=taken.seq, replayed=taken.sent)
            taken.sent = True

    def _answer(self, client: Client, reply: bytes, fds: Sequence[int] = ()) -> None:
        """Send ``reply`` to the client; takes ``fds``."""
        try:
            client.connection.answer(reply, fds)
        except ConnectionLost as error:
            self._lost(client, str(error))
        self._watch(client)

    def _lost(self, client: Client, reason: str) -> None:
        """The connection is over: the worker tears its session down and then says ``forget``."""
        log.info("client %d of %s: connection over: %s", client.number, client.listener, reason)
        self._no_interest(client.connection.fileno())
        client.connection.hang_up()
        if self._serving is not None:
            self._send(self._serving, "gone", client=client.number)
        elif self.broken:
            self._remove(client)

    def _remove(self, client: Client) -> None:
        self._clients.pop(client.number, None)
        self._no_interest(client.connection.fileno())
        client.close()

    # ------------------------------------------------------------------------------------------ crash loop

    def _break(self) -> None:
        """Give up on workers: guests get errors instead of silence."""
        self.broken = True
        self._spawn_at_s = None
        log.critical(
            "crash loop: %d workers in a row died within %.0f s. No more are started: devices read all ones "
            "and I/O fails. Find the cause above and start dpud anew.",
            self._quick_deaths,
            QUICK_DEATH_S,
        )
        if self._standby is not None:
            self._standby.kill("keeper: crash loop")
        if self._forks is not None and not self._forks.busy:  # else it still has a worker to tell of
            self._forks.kill("keeper: crash loop")
        self._selector.register(self._rpc.sock, selectors.EVENT_READ, self._refuse_rpc)
        for client in list(self._clients.values()):
            if not client.connection.open:
                self._remove(client)
                continue
            taken, client.taken, client.wanted = client.taken, None, True
            if taken:
                self._on_message(client, taken.message)
            self._on_client(client, selectors.EVENT_READ)

    def _refuse_rpc(self, _events: int) -> None:
        sock = self._accept(self._rpc.sock)
        if sock is not None:
            sock.close()


_FROM_WORKER: dict[str, Callable[[Keeper, Worker, Packet], None]] = {
    "up": Keeper._up,  # it serves
    "stash": Keeper._stash_fd,  # key, one descriptor: keep it for the next worker
    "unstash": Keeper._unstash_fd,  # key
    "listen": Keeper._listen,  # key, path: answered by "listening" with the error's text
    "unlisten": Keeper._unlisten,  # key: answered the same way
    "take": Keeper._take,  # client: its next message is no doorbell
    "reply": Keeper._reply,  # client, seq, raw reply (b"" for a posted message), descriptors
    "send": Keeper._send_raw,  # client, raw message: a command of ours (DMA); its reply comes as a message
    "drop": Keeper._drop,  # client, reason: close the connection; "gone" follows
    "forget": Keeper._forget,  # client: its session is torn down
    "loading": Keeper._loading,  # it gets on with what it does before it is up
    "prepare": Keeper._prepare,  # command, environment of other code: answered as by "listening"
    "change_over": Keeper._change_over,  # to it
    "stop": Keeper._stop,  # end the daemon; failed: why it cannot go on
}
