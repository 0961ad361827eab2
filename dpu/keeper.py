"""The keeper: the process of a daemon that does not die. It owns every socket and memory that outlives a worker.

::

    client --socket--> keeper --channel--> worker    (serves; killed at any instruction, the next one goes on)
                              --channel--> standby   (imported and compiled, waits for ``adopt``)

Doorbells never come here: the worker peeks at its dup of the client's socket and consumes them by itself. At
any other message it says ``take``; the keeper alone then reads that message with its descriptors, records it,
forwards it and sends the reply, so a message is answered exactly once whatever happens to workers. The
packets are listed in ``_FROM_WORKER`` and in ``_adopt``; their form is dpu/channel.py.

Use: ``Keeper(rpc_socket, ...).run()`` in the main thread; returns when asked to stop (SIGTERM, SIGINT, the
worker's ``stop``).
Parameters: see ``Keeper``. Limits: CLIENTS_MAX connections; see dpu/vfio_user/keeping.py for one of them.
Errors: EmuError when the RPC socket cannot be made or no worker ever comes up. A client's fault ends at most
its own connection; a worker's fault ends the worker.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import errno
import fcntl
import logging
import os
import selectors
import signal
import socket
import stat
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from dpu import killpoint
from dpu.channel import ConfigStore, Health, Packet, QueuedChannel, close_fds, receive
from dpu.errors import EmuError
from dpu.vfio_user import keeping

CLIENTS_MAX = 256

QUICK_DEATH_S = 5.0
"""A worker that dies sooner than this after it came up counts towards a crash loop."""

ADOPTION_S_MAX = 15.0
"""From ``go`` to ``up``; later counts as hung."""

STOP_S_MAX = 2.0
"""How long a worker may take to end after SIGTERM."""

_WATCH_TICKS = 8
_BACKOFF_S = (0.0, 0.1, 0.5, 2.0, 10.0, 30.0)
_READS_PER_TURN = 16
_PACKETS_PER_TURN = 64

log = logging.getLogger("dpud")


class State(enum.Enum):
    """Life of a worker: STARTING -> READY -> ADOPTED -> UP, and dead from any of them."""

    STARTING = enum.auto()
    READY = enum.auto()
    ADOPTED = enum.auto()
    UP = enum.auto()


class Watchdog:
    """Tells from samples of heartbeats whether one has stopped.

    It counts samples, not seconds: while the whole machine (or the keeper) stands still, nothing counts.
    """

    def __init__(self, ticks: int = _WATCH_TICKS) -> None:
        self._ticks = ticks
        self._words: tuple[int, ...] = ()
        self._still: list[int] = []

    def stuck(self, words: tuple[int, ...]) -> int | None:
        """Take a sample; return the index of a word that did not move for ``ticks`` samples."""
        if len(words) != len(self._words):
            self._words, self._still = words, [0] * len(words)
            return None
        self._still = [0 if new != old else n + 1 for new, old, n in zip(words, self._words, self._still)]
        self._words = words
        return next((i for i, n in enumerate(self._still) if n >= self._ticks), None)


@dataclass(eq=False)
class Worker:
    """One worker process and what the keeper shares with it."""

    process: subprocess.Popen[bytes]
    pidfd: int
    channel: QueuedChannel
    health: Health
    since_s: float
    state: State = State.STARTING
    watchdog: Watchdog = field(default_factory=Watchdog)
    verdict: str = ""
    ended_s: float | None = None
    channel_open: bool = True

    @property
    def pid(self) -> int:
        return self.process.pid


@dataclass
class Taken:
    """A message that has been read from a client and not yet been answered."""

    seq: int
    message: keeping.Message
    sent: bool = False


@dataclass(eq=False)
class Client:
    """One connection. ``wanted``: a worker has asked for the next message; it does not peek until answered."""

    number: int
    listener: str
    sock: socket.socket
    tables: keeping.Tables = field(default_factory=keeping.Tables)
    reader: keeping.MessageReader = field(default_factory=keeping.MessageReader)
    seq: int = 0
    wanted: bool = False
    taken: Taken | None = None
    out: deque[tuple[memoryview, list[int]]] = field(default_factory=deque)
    gone: bool = False

    @property
    def reading(self) -> bool:
        """Whether the keeper may read. A client that does not take its replies is not read either."""
        return self.wanted and not self.taken and not self.out and not self.gone


@dataclass(eq=False)
class Listener:
    """A listening socket and the identity of its file, so that only our own file is ever removed."""

    path: str
    sock: socket.socket
    identity: tuple[int, int]

    def close(self) -> None:
        """Stop listening and remove the socket file."""
        self.sock.close()
        with contextlib.suppress(OSError):
            status = os.lstat(self.path)
            if (status.st_dev, status.st_ino) == self.identity:
                os.unlink(self.path)


def listen(path: str) -> Listener:
    """Listen at ``path``, mode 0600; a socket file that nobody listens at any more is replaced.

    :raises OSError: EADDRINUSE when somebody listens there, EEXIST for a file that is no socket, ...
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _locked_directory(os.path.dirname(path) or "."):
            _remove_stale(path)
            mask = os.umask(0o177)
            try:
                sock.bind(path)
            finally:
                os.umask(mask)
            sock.listen(128)
            status = os.lstat(path)
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return Listener(path, sock, (status.st_dev, status.st_ino))


@contextlib.contextmanager
def _locked_directory(path: str) -> Iterator[None]:
    """Keep two daemons from looking at one stale file at the same time, without a lock file left behind."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for _ in range(100):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.01)
        else:
            raise OSError(errno.EBUSY, "another process holds a lock on the directory")
        yield
    finally:
        os.close(fd)


def _remove_stale(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(errno.EEXIST, "a file that is no socket is in the way")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except BlockingIOError:  # its backlog is full: somebody is there
            pass
        raise OSError(errno.EADDRINUSE, "another process listens there")


class Keeper:
    """One daemon.

    :param rpc_socket: path of the JSON-RPC socket
    :param command: argv of a worker; the channel's and the health memfd's descriptor numbers are appended
    :param cpus: CPUs of the pollers
    :param environment: environment of workers
    :param watchdog_s: seconds without a heartbeat until a worker is killed; 0: never
    :param standby: keep a second worker ready
    :param crash_limit: quick deaths in a row until the keeper gives up on workers; 0: never
    :param on_ready: called once, when the first worker is up
    :raises EmuError: the RPC socket cannot be made
    """

    def __init__(
        self,
        rpc_socket: str,
        command: Sequence[str],
        *,
        cpus: Sequence[int],
        environment: Mapping[str, str] | None = None,
        watchdog_s: float = 3.0,
        standby: bool = True,
        crash_limit: int = 5,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self._command = list(command)
        self._cpus = list(cpus)
        self._environment = dict(os.environ if environment is None else environment)
        self._watchdog_s = watchdog_s
        self._keep_standby = standby
        self._crash_limit = crash_limit
        self._on_ready: Callable[[], None] | None = on_ready

        self._selector = selectors.DefaultSelector()
        self._serving: Worker | None = None
        self._standby: Worker | None = None
        self._spawned = 0
        self._generation = 0
        self._quick_deaths = 0
        self._failed_starts = 0
        self._spawn_at_s: float | None = 0.0
        self._tick_at_s = 0.0
        self._death: tuple[int, str, float] | None = None
        self.broken = False
        self._stopping = False

        self._clients: dict[int, Client] = {}
        self._next_client = 1
        self._listeners: dict[str, Listener] = {}
        self._stash: dict[str, int] = {}
        self._config = ConfigStore.create()
        # Closed for a moment when descriptors run out, so that a connection can be taken and refused.
        self._spare_fd = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._rpc = listen(rpc_socket)
        except OSError as error:
            raise EmuError(
                f"cannot listen at {rpc_socket}: {error.strerror or error}",
                "end the other dpud or name another socket with -r",
            ) from error

    # ------------------------------------------------------------------------------------------- main loop

    def run(self) -> None:
        """Serve until asked to stop.

        :raises EmuError: no worker ever came up
        """
        try:
            with self._signals():
                while not self._stopping:
                    self._turn()
        finally:
            self._shutdown()

    def stop(self) -> None:
        """Leave ``run`` after the current turn."""
        self._stopping = True

    def _turn(self) -> None:
        now = time.monotonic()
        timers = [self._tick_at_s] + ([self._spawn_at_s] if self._spawn_at_s is not None else [])
        for key, events in self._selector.select(max(0.0, min(timers) - now)):
            registered = self._selector.get_map().get(key.fd)
            if registered is not None and registered.data is key.data:  # not by an earlier event of this turn
                key.data(events)
        self._timers()

    def _timers(self) -> None:
        now = time.monotonic()
        if now >= self._tick_at_s:
            self._tick_at_s = now + (self._watchdog_s or QUICK_DEATH_S) / _WATCH_TICKS
            self._watch_worker(now)
        if self._spawn_at_s is not None and now >= self._spawn_at_s:
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

    def _shutdown(self) -> None:
        for listener in [self._rpc, *self._listeners.values()]:
            listener.close()
        workers = [worker for worker in (self._serving, self._standby) if worker]
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            try:
                worker.process.wait(STOP_S_MAX)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
            self._dispose(worker)
        for client in list(self._clients.values()):
            self._hang_up(client)
            self._forget(client)
        close_fds([*self._stash.values(), self._config, self._spare_fd])
        self._selector.close()

    # --------------------------------------------------------------------------------------------- workers

    def _spawn(self) -> None:
        """Start a worker; it serves or stands by, as needed when it is ready."""
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        health_fd = Health.create()
        fds = (theirs.fileno(), health_fd)
        keeper = os.getpid()

        def bound_to_keeper() -> None:
            # The kernel takes the *thread* that forks for the parent: run() is in the main thread.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != keeper:
                os._exit(1)

        self._spawned += 1
        try:
            process = subprocess.Popen(
                [*self._command, *map(str, fds)],
                stdin=subprocess.DEVNULL,
                pass_fds=fds,
                env=self._worker_environment(),
                start_new_session=True,  # Ctrl-C in a terminal is the keeper's to handle
                preexec_fn=bound_to_keeper,
            )
        except (OSError, subprocess.SubprocessError) as error:
            mine.close()
            os.close(health_fd)
            log.error("cannot start a worker: %s", error)
            self._start_failed()
            return
        finally:
            theirs.close()
        worker = Worker(process, os.pidfd_open(process.pid), QueuedChannel(mine), Health(health_fd), time.monotonic())
        os.close(health_fd)
        self._standby = worker
        self._selector.register(worker.pidfd, selectors.EVENT_READ, partial(self._on_exit, worker))
        self._selector.register(worker.channel, selectors.EVENT_READ, partial(self._on_channel, worker))

    def _worker_environment(self) -> dict[str, str]:
        generations = int(self._environment.get(killpoint.GENERATIONS_VARIABLE, "1"))
        if self._spawned <= generations:
            return self._environment
        return {k: v for k, v in self._environment.items() if k != killpoint.VARIABLE}

    def _promote(self) -> None:
        """Let the standby serve, as soon as it is ready and nobody serves."""
        worker = self._standby
        if self._serving is None and worker is not None and worker.state is State.READY:
            self._serving, self._standby = worker, None
            self._adopt(worker)

    def _adopt(self, worker: Worker) -> None:
        self._generation += 1
        self._enter(worker, State.ADOPTED)
        self._send(
            worker,
            "adopt",
            fds=[self._rpc.sock.fileno(), self._config],
            generation=self._generation,
            cpus=self._cpus,
        )
        for key, fd in self._stash.items():
            self._send(worker, "fd", fds=[fd], key=key)
        for key, listener in self._listeners.items():
            self._send(worker, "listener", key=key, path=listener.path)
        for client in self._clients.values():
            self._introduce(worker, client)
        self._send(worker, "go")
        for client in list(self._clients.values()):
            if client.taken:
                self._forward(client, client.taken)
            if client.gone:
                self._send(worker, "gone", client=client.number)

    def _introduce(self, worker: Worker, client: Client) -> None:
        """The connection and what it has set up.

        ``taking``: the keeper is reading the next message, so the socket is not to be peeked at before that
        message has come and been answered. A take of which nothing has been read yet is forgotten instead.
        """
        if not client.taken and not client.reader.partial:
            client.wanted = False
            self._watch(client)
        self._send(
            worker,
            "client",
            raw=client.tables.version,
            fds=[client.sock.fileno()],
            client=client.number,
            listener=client.listener,
            taking=client.wanted or client.taken is not None,
        )
        for region in client.tables.regions:
            self._send(
                worker,
                "dma",
                fds=[] if region.fd is None else [region.fd],
                client=client.number,
                flags=region.flags,
                offset=region.offset,
                iova=region.iova,
                size=region.size,
            )
        for index, start, fds in client.tables.irq_ranges():
            self._send(worker, "irq", fds=fds, client=client.number, index=index, start=start)

    def _enter(self, worker: Worker, state: State) -> None:
        worker.state = state
        worker.since_s = time.monotonic()

    def _send(self, worker: Worker, op: str, *, raw: bytes = b"", fds: Sequence[int] = (), **fields: object) -> None:
        if not worker.channel_open:
            return
        try:
            worker.channel.send(op, raw=raw, fds=fds, **fields)
        except OSError:  # it has died; its end of file follows
            return
        self._watch_channel(worker)

    def _watch_channel(self, worker: Worker) -> None:
        if worker.channel_open:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.channel.backlog else 0)
            self._interest(worker.channel.fileno(), events, partial(self._on_channel, worker))

    def _on_channel(self, worker: Worker, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            with contextlib.suppress(OSError):
                worker.channel.flush()
            self._watch_channel(worker)
        if events & selectors.EVENT_READ:
            self._receive(worker, _PACKETS_PER_TURN)

    def _receive(self, worker: Worker, packets: int | None) -> None:
        """Handle up to ``packets`` packets (None: all); a worker that talks nonsense is killed."""
        while worker.channel_open and (packets is None or packets > 0):
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
                self._kill(worker, "bad packet")
        return None

    def _end_of_file(self, worker: Worker) -> None:
        """The worker is dead or as good as dead; its pidfd tells when."""
        worker.ended_s = time.monotonic()
        worker.channel_open = False
        self._selector.unregister(worker.channel)
        worker.process.kill()

    def _on_packet(self, worker: Worker, packet: Packet) -> None:
        if packet.op == "ready":
            if worker.state is State.STARTING:
                self._enter(worker, State.READY)
                self._failed_starts = 0
                self._promote()
            return packet.close()
        if worker is not self._serving:
            packet.close()
            raise ValueError(f"{packet.op!r} from a worker that does not serve")
        try:
            return _FROM_WORKER[packet.op](self, worker, packet)
        except Exception:
            packet.close()
            raise

    def _on_exit(self, worker: Worker, _events: int) -> None:
        """The process has ended: what it sent still counts, then the next one takes over."""
        how = _how(worker.process.wait(), worker.verdict)
        ended_s = worker.ended_s or time.monotonic()
        self._receive(worker, None)
        served = worker is self._serving
        lived_s = ended_s - worker.since_s
        self._dispose(worker)
        if self._stopping:
            return
        if not served:
            self._standby = None
            log.warning("worker %d died (%s) before it served", worker.pid, how)
            return self._start_failed()
        self._serving = None
        if self._death is None:
            self._death = (worker.pid, how, ended_s)
        else:
            log.warning("worker %d died (%s) before it served", worker.pid, how)
        self._count_death(worker.state is State.UP and lived_s >= QUICK_DEATH_S)
        if not self.broken:
            self._promote()
            if self._serving is None and self._standby is None:
                self._spawn_at_s = time.monotonic() + self._backoff(self._quick_deaths - 1)

    def _start_failed(self) -> None:
        """A worker ended (or could not be started) before it was ready."""
        self._failed_starts += 1
        if self._serving is None:
            self._count_death(False)
        if not self.broken:
            self._spawn_at_s = time.monotonic() + self._backoff(self._failed_starts)

    @staticmethod
    def _backoff(failures: int) -> float:
        return _BACKOFF_S[max(0, min(failures, len(_BACKOFF_S) - 1))]

    def _count_death(self, lived_long: bool) -> None:
        self._quick_deaths = 0 if lived_long else self._quick_deaths + 1
        if not self._crash_limit or self._quick_deaths < self._crash_limit or self.broken:
            return
        if self._on_ready is not None:
            raise EmuError(
                f"no worker came up in {self._quick_deaths} tries",
                "its errors are in the log above; python -m dpu.worker is the program",
            )
        self._break()

    def _dispose(self, worker: Worker) -> None:
        for fd in (worker.pidfd, worker.channel.fileno()):
            self._interest(fd, 0, lambda _events: None)
        os.close(worker.pidfd)
        worker.channel_open = False
        worker.channel.close()
        worker.health.close()

    def _kill(self, worker: Worker, verdict: str) -> None:
        worker.verdict = worker.verdict or verdict
        worker.process.kill()

    def _watch_worker(self, now: float) -> None:
        worker = self._serving
        if worker is None or not self._watchdog_s:
            return
        if worker.state is State.ADOPTED and now - worker.since_s > ADOPTION_S_MAX:
            return self._kill(worker, "watchdog: adoption")
        if worker.state is State.UP:
            stuck = worker.watchdog.stuck(worker.health.snapshot())
            if stuck is not None:
                self._kill(worker, "watchdog: control" if stuck == 0 else f"watchdog: poller {stuck - 1}")

    # ------------------------------------------------------------------------------- packets of the worker

    def _up(self, worker: Worker, _packet: Packet) -> None:
        self._enter(worker, State.UP)
        if self._death is not None:
            pid, how, ended_s = self._death
            pause_ms = (worker.since_s - ended_s) * 1000
            log.warning("worker %d died (%s), %d serves after %.1f ms", pid, how, worker.pid, pause_ms)
            self._death = None
        if self._on_ready is not None:
            on_ready, self._on_ready = self._on_ready, None
            on_ready()
        if self._keep_standby and self._standby is None and self._spawn_at_s is None:
            # Not before: loading it would compete with the one that the guests wait for.
            self._spawn_at_s = time.monotonic() + self._backoff(self._failed_starts)

    def _stash_fd(self, _worker: Worker, packet: Packet) -> None:
        key = str(packet.fields["key"])
        (fd,) = packet.fds
        close_fds([self._stash.pop(key)] if key in self._stash else [])
        self._stash[key] = fd

    def _unstash_fd(self, _worker: Worker, packet: Packet) -> None:
        fd = self._stash.pop(packet.fields["key"], None)
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
            self._selector.unregister(listener.sock)
            listener.close()
        self._send(worker, "listening", key=key, error="" if listener else "no such listener")

    def _take(self, _worker: Worker, packet: Packet) -> None:
        client = self._clients.get(packet.fields["client"])
        if client is not None and not client.gone:
            client.wanted = True
            self._on_client(client, selectors.EVENT_READ)

    def _reply(self, _worker: Worker, packet: Packet) -> None:
        client = self._clients.get(packet.fields["client"])
        taken = client.taken if client else None
        if client is None or taken is None or taken.seq != packet.fields["seq"]:
            return packet.close()
        client.taken = None
        if keeping.failed(packet.raw):
            close_fds(taken.message.fds)
        else:
            client.tables.commit(taken.message)
        self._answer(client, packet.raw, packet.fds)
        self._watch(client)
        return None

    def _drop(self, _worker: Worker, packet: Packet) -> None:
        client = self._clients.get(packet.fields["client"])
        if client is not None and not client.gone:
            self._lost(client, str(packet.fields.get("reason", "")))

    def _forget_client(self, _worker: Worker, packet: Packet) -> None:
        client = self._clients.get(packet.fields["client"])
        if client is not None:
            self._hang_up(client)
            self._forget(client)

    def _stop(self, _worker: Worker, _packet: Packet) -> None:
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
        client = Client(self._next_client, key, sock)
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
        events = selectors.EVENT_READ if client.reading else 0
        if client.out and not client.gone:
            events |= selectors.EVENT_WRITE
        self._interest(client.sock.fileno(), events, partial(self._on_client, client))

    def _on_client(self, client: Client, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush(client)
        for _ in range(_READS_PER_TURN):
            if not client.reading or not self._read(client):
                break
        self._watch(client)

    def _read(self, client: Client) -> bool:
        """Receive one piece; False when there is none."""
        try:
            data, fds, flags = receive(client.sock, client.reader.want, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError as error:
            self._lost(client, str(error))
            return False
        if flags & socket.MSG_CTRUNC:
            close_fds(fds)
            self._lost(client, "descriptors were lost: too many are open here")
        elif not data:
            close_fds(fds)
            self._lost(client, "the client closed it")
        else:
            try:
                message = client.reader.feed(data, fds)
            except keeping.StreamError as error:
                self._lost(client, str(error))
                return False
            if message is not None:
                self._on_message(client, message)
        return not client.gone

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
            self._send(
                self._serving,
                "message",
                raw=taken.message.raw,
                fds=taken.message.fds,
                client=client.number,
                seq=taken.seq,
                replayed=taken.sent,
            )
            taken.sent = True

    def _answer(self, client: Client, reply: bytes, fds: Sequence[int] = ()) -> None:
        """Send ``reply`` as far as the client takes it now, the rest later; takes ``fds``."""
        if client.gone or not reply:
            return close_fds(fds)
        client.out.append((memoryview(reply), list(fds)))
        return self._flush(client)

    def _flush(self, client: Client) -> None:
        while client.out:
            data, fds = client.out.popleft()
            try:
                flags = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
                sent = socket.send_fds(client.sock, [data], fds, flags)
            except BlockingIOError:
                client.out.appendleft((data, fds))
                break
            except OSError as error:
                close_fds(fds)
                return self._lost(client, str(error))
            close_fds(fds)  # they went with the first byte
            if sent < len(data):
                client.out.appendleft((data[sent:], []))
        return None

    def _lost(self, client: Client, reason: str) -> None:
        """The connection is over: the worker tears its session down and then says ``forget``."""
        log.info("client %d of %s: connection over: %s", client.number, client.listener, reason)
        self._hang_up(client)
        if self._serving is not None:
            self._send(self._serving, "gone", client=client.number)
        elif self.broken:
            self._forget(client)

    def _hang_up(self, client: Client) -> None:
        """End the connection for every dup of its socket.

        Nothing is left unread: the reset that follows makes QEMU abort.
        """
        if client.gone:
            return
        client.gone = True
        self._watch(client)
        with contextlib.suppress(OSError):
            client.sock.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            while client.sock.recv(65536, socket.MSG_DONTWAIT):
                pass

    def _forget(self, client: Client) -> None:
        self._clients.pop(client.number, None)
        self._interest(client.sock.fileno(), 0, lambda _events: None)
        client.sock.close()
        client.reader.close()
        client.tables.close()
        if client.taken:
            close_fds(client.taken.message.fds)
        for _, fds in client.out:
            close_fds(fds)

    # -------------------------------------------------------------------------------------------- crash loop

    def _break(self) -> None:
        """Give up on workers: guests get errors instead of silence."""
        self.broken = True
        self._spawn_at_s = None
        log.critical(
            "crash loop: %d workers in a row died within %.0f s. No worker is started any more; devices read "
            "all ones and I/O fails. Look for the cause above and start dpud anew.",
            self._quick_deaths,
            QUICK_DEATH_S,
        )
        if self._standby is not None:
            self._kill(self._standby, "crash loop")
        self._selector.register(self._rpc.sock, selectors.EVENT_READ, self._refuse_rpc)
        for client in list(self._clients.values()):
            if client.gone:
                self._forget(client)
                continue
            taken, client.taken, client.wanted = client.taken, None, True
            if taken:
                self._on_message(client, taken.message)
            self._on_client(client, selectors.EVENT_READ)

    def _refuse_rpc(self, _events: int) -> None:
        sock = self._accept(self._rpc.sock)
        if sock is not None:
            sock.close()


_PR_SET_PDEATHSIG = 1

_FROM_WORKER: dict[str, Callable[[Keeper, Worker, Packet], None]] = {
    "up": Keeper._up,  # it serves
    "stash": Keeper._stash_fd,  # key, one descriptor: keep it for the next worker
    "unstash": Keeper._unstash_fd,  # key
    "listen": Keeper._listen,  # key, path: answered by "listening" with error text
    "unlisten": Keeper._unlisten,  # key: answered the same way
    "take": Keeper._take,  # client: its next message is no doorbell
    "reply": Keeper._reply,  # client, seq, raw reply (b"" for a posted message), descriptors
    "drop": Keeper._drop,  # client, reason: close the connection
    "forget": Keeper._forget_client,  # client: its session is torn down
    "stop": Keeper._stop,  # end the daemon
}


def _how(returncode: int, verdict: str) -> str:
    """ "SIGKILL", "exit 1", with our reason when it was us."""
    if returncode >= 0:
        text = f"exit {returncode}"
    else:
        try:
            text = signal.Signals(-returncode).name
        except ValueError:
            text = f"signal {-returncode}"
    return f"{text} by {verdict}" if verdict else text
