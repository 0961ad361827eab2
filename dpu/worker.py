"""The worker: what serves, and may be killed. Control (asyncio, this thread) and compiled pollers (one per CPU).

    python -m dpu.worker CHANNEL_FD

That process imports and compiles, and is then the fork server (dpu/forkserver.py): workers are forks of it. A worker
says ``ready``, and waits as the keeper's standby. With ``adopt`` the keeper hands it all
that outlives a worker; with ``go`` it takes up every client where the last worker left it, and says ``up``.
The packets are listed in dpu/keeper.py.

Environment (set by the keeper or for measurements): NUMBA_CACHE_DIR; DPU_EMU_STAMPS=0 takes no time stamps on the
data path, DPU_EMU_COUNTERS=0 counts nothing, DPU_EMU_SPIN=n idle passes before a poller sleeps, DPU_EMU_URING=0
does file I/O in threads, DPU_EMU_NAP_US=n longest nap while a client has mapped its doorbells, DPU_EMU_QUIET_US=n
without a command make a controller quiet (dpu.fastpath.poller), DPU_EMU_TRACE=0 compiles the trace out.

Errors: a fault of ours ends the process; the keeper starts the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import gc
import itertools
import json
import logging
import mmap
import os
import signal
import socket
import struct
import sys
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from typing import Any

import numpy as np

from dpu import forkserver, jitcache, killpoint, layout, shape, trace
from dpu.backends import Backend, FileBackend, Marks, MemoryBackend, marks_key, stash_key
from dpu.channel import Channel, ConfigStore, Health, Packet
from dpu.errors import EmuError, RpcError, VfioUserError
from dpu.fastpath.jit import TRACEABLE
from dpu.fastpath.poller import NAP_US, QUIET_US, SPIN_PASSES, Poller, compile_all, now, tick_rate
from dpu.fastpath.uring import NoRing, Ring
from dpu.gates import STASH_KEY, Gates
from dpu.guestmap import Mapping
from dpu.iostat import Row
from dpu.listener import private_directory
from dpu.nvme.controller import State
from dpu.qos import Limits
from dpu.rpc.dispatcher import Dispatcher
from dpu.rpc.methods import dispatcher
from dpu.rpc.server import Server
from dpu.rpc.warnings import warn
from dpu.session import Client
from dpu.target import Subsystem, Target, invalid
from dpu.vfio_user.keeping import error_reply
from dpu.volumes.area import Area

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.25
FENCE_POLL_S = 0.001
FENCE_POLLS_SAID = 3000
_OFD_SETLK = 37  # <fcntl.h>; the fcntl module has it from Python 3.13 on
CLOSE_POLL_S = 0.002
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def _flag(name: str, default: int) -> int:
    return int(os.environ.get(name, default))


class Worker:
    """Satisfies dpu.target's Host."""

    def __init__(self, channel: Channel, health: Health) -> None:
        self.channel = channel
        self.health = health
        self.target = Target(self)
        self.clients: dict[int, Client] = {}
        self.pollers: list[Poller] = []
        self._coming: set[int] = set()  # new clients that have not been taken yet
        self._refused: dict[int, str] = {}
        self._adopted: list[Packet] = []
        self._fds: dict[str, int] = {}
        self._listeners: dict[str, str] = {}
        self._listening: dict[str, asyncio.Future[str]] = {}
        self._mappings: dict[str, Mapping] = {}
        self._ended = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._serving = False
        self._tracing = False
        self._pauses: list[dict[str, Any]] = []

    # ------------------------------------------------------------------------------------------------- its life

    async def run(self) -> None:
        """Serve until the keeper closes the channel."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self.channel.fileno(), self._readable)
        loop.add_signal_handler(signal.SIGTERM, self._ended.set)
        self._beat()
        self.channel.send("ready", pid=os.getpid())
        await self._ended.wait()
        await self.target.lvols.commit()

    def _beat(self) -> None:
        self.health.beat()
        asyncio.get_running_loop().call_later(HEARTBEAT_S, self._beat)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` beside; a fault in it ends the worker."""

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and task.exception() is not None:
                log.error("fault of the worker", exc_info=task.exception())
                os._exit(70)

        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(ended)

    def _readable(self) -> None:
        try:
            while (packet := self.channel.recv(blocking=False)) is not None:
                self._packet(packet)
        except BlockingIOError:
            return
        self._ended.set()

    def _packet(self, packet: Packet) -> None:
        op = packet.op
        if op in ("adopt", "fd", "listener", "dma", "irq") or (op == "client" and not self._serving):
            self._adopted.append(packet)
        elif op == "go":
            self.spawn(self._go())
        elif op == "listening":
            future = self._listening.pop(packet.fields["key"], None)
            if future is not None and not future.done():
                future.set_result(packet.fields["error"])
        elif op == "pause":
            self._pauses = packet.fields["pauses"]
        elif not self._serving:
            self._adopted.append(packet)  # messages and ends of connections that follow "go" at once
        elif op == "client":
            self._coming.add(packet.fields["client"])
            self.spawn(self._new_client(packet))
        elif op == "message":
            self._message(packet)
        elif op == "gone":
            self.spawn(self._gone(packet.fields["client"]))
        else:
            raise AssertionError(f"packet {op!r}")

    def _message(self, packet: Packet) -> None:
        number = packet.fields["client"]
        if number in self.clients:
            self.clients[number].message(packet)
            return
        packet.close()
        if number in self._refused:
            reply = error_reply(packet.raw, errno.EBUSY)
            self.channel.send("reply", raw=reply, client=number, seq=packet.fields["seq"])
            self.channel.send("drop", client=number, reason=self._refused[number])

    async def _go(self) -> None:
        """Take over."""
        packets, self._adopted = self._adopted, []
        clients = self._sort(packets)
        config = self.config.load()
        self.target.from_config(json.loads(config) if config else {}, self._fds)
        self.target.logs.apply()
        self._open_gates()
        for backend in self.target.bdevs.values():
            await self._fence(backend)
        self._start_pollers()
        for packet in self._adoptable(clients):
            self._adopt_client(packet, [p for p in packets if p.fields.get("client") == packet.fields["client"]])
        for packet in packets:  # memory and vectors of those that are not taken up
            if packet.op in ("dma", "irq") and packet.fields["client"] not in self.clients:
                packet.close()
        self._drop_orphans()
        for poller in self.pollers:
            poller.start()
        for client, taking in self._starting:
            client.start(taking=taking)
        rpc = dispatcher(self.target)
        if not await self._make_first_calls(rpc):
            return
        self._serving = True
        self.channel.send("up")
        late, self._adopted = self._adopted, []
        # A client that _adoptable has put off comes before the end of its connection.
        ends = [p for p in packets if p.op in ("message", "gone")]
        for packet in [p for p in late if p.op == "client"] + ends + [p for p in late if p.op != "client"]:
            self._packet(packet)
        await self.target.recover(self._listeners)
        self._rpc = Server(self._rpc_socket, rpc)
        await self._rpc.start()

    async def _make_first_calls(self, rpc: Dispatcher) -> bool:
        """Make the calls of the file that the daemon was started with; False when one has failed.

        A call is struck off before it is made: what it commits is then itself and that it is no longer to be made.
        """
        if self.target.calls:
            await self.target.recover(self._listeners)
        while self.target.calls:
            call = self.target.calls.pop(0)
            try:
                await rpc.call(call["method"], call.get("params"))
            except RpcError as error:
                self.channel.send(
                    "stop", failed=f"a call of the file cannot be done: {call['method']}: {error.message}"
                )
                return False
            self.channel.send("loading")
        return True

    def _sort(self, packets: list[Packet]) -> list[Packet]:
        """Take in what the keeper holds; returns the packets of its clients."""
        for packet in packets:
            if packet.op == "adopt":
                self.generation: int = packet.fields["generation"]
                self._cpus: list[int] = packet.fields["cpus"]
                self._rpc_socket = socket.socket(fileno=packet.fds[0])
                self.config = ConfigStore(packet.fds[1])
            elif packet.op == "fd":
                self._fds[packet.fields["key"]] = packet.fds[0]
            elif packet.op == "listener":
                self._listeners[packet.fields["key"]] = packet.fields["path"]
        self._starting: list[tuple[Client, bool]] = []
        return [packet for packet in packets if packet.op == "client"]

    async def _fence(self, backend: Backend) -> None:
        """Wait until no request of an earlier worker is under way on a file.

        What a killed worker gave to io_uring with O_DIRECT still finishes by itself, into guest memory and into the
        file; a command executed again before that could be overtaken by its own older self. Such a request holds
        the open file that it was made on, so a lock of that open file is free when the last one has ended.
        """
        if not isinstance(backend, FileBackend) or backend.direct_fd < 0 or backend.readonly:
            return
        lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        for attempt in itertools.count(1):
            try:
                fcntl.fcntl(backend.direct_fd, _OFD_SETLK, lock)
                return
            except BlockingIOError:
                if attempt % FENCE_POLLS_SAID == 0:
                    log.warning("bdev %s: waiting for the last worker's file requests", backend.name)
                    if not self._serving:  # a disk that hangs is no hung worker: the next one would wait as well
                        self.channel.send("loading")
                await asyncio.sleep(FENCE_POLL_S)

    def _start_pollers(self) -> None:
        """One per CPU."""
        self._began = now()
        words = np.frombuffer(self.health.words, np.uint64)
        for i, cpu in enumerate(self._cpus or [-1]):
            ring = self._ring(i)
            address = int(words.ctypes.data) + 8 * (Health.FIRST_POLLER + i)
            serving = address + 8 * Health.SERVING
            stamps, spin = bool(_flag("DPU_EMU_STAMPS", 1)), _flag("DPU_EMU_SPIN", SPIN_PASSES)
            nap_us = _flag("DPU_EMU_NAP_US", NAP_US)
            quiet_us = _flag("DPU_EMU_QUIET_US", QUIET_US)
            poller = Poller(
                cpu if cpu >= 0 else None,
                address,
                ring,
                serving=serving,
                stamps=stamps,
                spin=spin,
                nap_us=nap_us,
                quiet_us=quiet_us,
                number=i,
            )
            poller.record.gates = self.gates.base
            poller.record.counters = _flag("DPU_EMU_COUNTERS", 1)
            poller.record.kill_point = layout.KILL_POINTS.get(killpoint.NAME, 0)
            poller.record.kill_after = killpoint.parse(os.environ.get(killpoint.VARIABLE, ""))[1]
            self._adopt_trace(i, poller)
            self.pollers.append(poller)
            asyncio.get_running_loop().add_reader(poller.control_fd, self._woken, poller)
        self.health.words[Health.POLLERS] = len(self.pollers)

    def _open_gates(self) -> None:
        """The kept area of gates: the last worker's, brought up to what is committed."""
        fd = self._fds.pop(STASH_KEY, -1)
        if fd < 0:
            self.gates = Gates.create()
            self.stash(STASH_KEY, self.gates.fd)
            return
        self.gates = Gates(fd)
        for name, number in self.target.gates.items():
            self.gates.adopt(number)
            self._fill_gate(name)

    def _fill_gate(self, name: str) -> None:
        number = self.target.gates[name]
        self.gates.set_limits(number, self.target.limits.get(name, Limits()))
        self.gates.set_rules(number, self.target.faults_of(name))
        self.gates.record(number).managed = int(name in self.target.journals)

    def clear_gate(self, number: int) -> None:
        self.gates.clear(number)

    def gate_changed(self, name: str) -> None:
        self._fill_gate(name)
        for client in self._open_clients():
            client.open_gates()
        for poller in self.pollers:
            poller.look_at_waiting()

    async def release(self, number: int) -> int:
        return sum([await client.plane.release(number) for client in self._open_clients()])

    def fault_counts(self, number: int) -> tuple[int, int]:
        row = self.gates.rule(number)
        return int(row.matches), int(row.struck)

    def health_changed(self, backend: Backend, persistent: bool) -> None:
        for client in self._open_clients():
            served = [nsid for nsid in client.subsystem.by_nsid if client.plane.serves(nsid)]
            if any(client.subsystem.backend(nsid) is backend for nsid in served):
                client.controller.check_health()
                if persistent:
                    client.controller.internal_error(persistent=True)
                client.commit()

    def _ring(self, number: int) -> Ring | NoRing:
        try:
            if not _flag("DPU_EMU_URING", 1):
                raise EmuError("io_uring is switched off by DPU_EMU_URING=0")
            return Ring.create()
        except EmuError as error:
            if number == 0:
                log.warning("%s; file I/O goes through threads, which is slower", error)
            return NoRing()

    def poller_for(self, number: int) -> Poller:
        """The poller of a client, the same for every worker."""
        return self.pollers[number % len(self.pollers)]

    def memory_of(self, backend: MemoryBackend) -> int:
        """Address of a memory back end, mapped once."""
        key = str(backend.uuid)
        if key not in self._mappings:
            self._mappings[key] = Mapping(backend.fd, backend.size_bytes)
        return self._mappings[key].host

    def prepare_marks(self, subsystem: Subsystem, nsid: int) -> None:
        """A namespace is going to have blocks marked by Write Uncorrectable: give its back end the room for marks."""
        backend = subsystem.by_nsid[nsid].backend if nsid in subsystem.by_nsid else None
        if backend is None or backend.marks is not None:
            return
        try:
            backend.marks = Marks.create(subsystem.by_nsid[nsid].num_blocks)
        except OSError as error:
            log.error("bdev %s: no marks for Write Uncorrectable: %s", backend.name, error.strerror)
            return
        self.stash(marks_key(backend.name), backend.marks.fd)
        for client in self._clients_of(subsystem):
            client.plane.set_marks(nsid)

    def _clients_at(self, poller: Poller) -> list[Client]:
        return [client for client in self.clients.values() if client.plane.poller is poller]

    @property
    def directory(self) -> str:
        return private_directory(str(self._rpc_socket.getsockname()))

    @property
    def poller_count(self) -> int:
        return len(self._cpus) or 1

    async def volume_changed(self, volume: Backend) -> None:
        """As VolumeHost's."""
        serving = [(client, nsid) for client in self._open_clients() for nsid in client.plane.nsids_of(volume)]
        async with contextlib.AsyncExitStack() as stack:
            for client in {client for client, _ in serving}:
                await stack.enter_async_context(client.plane.quiet(control=False))
            self.target.fit_marks(volume)
            for client, nsid in serving:
                client.plane.set_size(nsid)
                client.plane.set_marks(nsid)
        for client, nsid in serving:
            self._tell(client, nsid)

    @contextlib.asynccontextmanager
    async def quiet(self, area: Area) -> AsyncIterator[None]:
        """As VolumeHost's."""
        async with area.lock, area.gate.closed(), contextlib.AsyncExitStack() as stack:
            area.newcomers = []
            try:
                for client in list(self.clients.values()):
                    if any(volume.area is area for volume in client.plane.volumes()):
                        await stack.enter_async_context(client.plane.quiet(control=False))
                yield
            finally:
                newcomers, area.newcomers = area.newcomers, None
                for plane in newcomers:
                    plane.hold(False)

    async def grace(self) -> None:
        for poller in self.pollers:
            await poller.grace()

    async def settled_volumes(self, area: Area) -> None:
        async with area.gate.closed():
            pass
        await asyncio.gather(*(poller.settled() for poller in self.pollers))

    def _trim_mappings(self) -> None:
        """Unmap memory back ends that are gone; nothing uses them when this is called."""
        used = {str(backend.uuid) for backend in self.target.bdevs.values()}
        for key in [key for key in self._mappings if key not in used]:
            self._mappings.pop(key).close()

    def _woken(self, poller: Poller) -> None:
        """A poller has something for control."""
        poller.woken()
        if poller.record.refill:
            poller.record.refill = 0
            for store in {volume.store for client in self._clients_at(poller) for volume in client.plane.volumes()}:
                store.look(poller.number)
        by_index = {client.plane.index: client for client in self.clients.values() if client.plane.poller is poller}
        for record in poller.errors():  # before commands: one of them may read the log
            if int(record.controller) in by_index:
                by_index[int(record.controller)].failed(record)
        for index, slot in poller.misses():
            if index in by_index:
                by_index[index].missed(slot)
        for client in by_index.values():
            client.look()

    # -------------------------------------------------------------------------------------------------- clients

    @staticmethod
    def _keys(number: int) -> tuple[str, str]:
        return f"controller/{number}/state", f"controller/{number}/bar"

    def _make_areas(self, number: int) -> tuple[int, int]:
        """The kept areas of a new controller. The second one stashed makes the pair complete."""
        state_key, bar_key = self._keys(number)
        state_fd = shape.create(state_key)
        self.stash(state_key, state_fd)
        bar_fd = os.memfd_create(bar_key, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(bar_fd, layout.BAR_FILE_BYTES)
        fcntl.fcntl(bar_fd, fcntl.F_ADD_SEALS, _SIZE_SEALS)  # a client that maps its doorbells gets this one
        self.stash(bar_key, bar_fd)
        return state_fd, bar_fd

    def _current(self, number: int, fd: int) -> int:
        """The state area of a client as this code lays it out: that of other code is left behind (dpu.upgrade)."""
        made = shape.current(fd)
        if made != fd:
            self.stash(self._keys(number)[0], made)
            os.close(fd)
        return made

    def _client(self, packet: Packet, areas: tuple[int, int] | None) -> Client | None:
        """A client with its controller, not yet serving; None when it cannot be served: then it is dropped."""
        number, key = packet.fields["client"], packet.fields["listener"]
        subsystem = self.target.subsystem_of(key)
        reason = ""
        if subsystem is None:
            reason = "its subsystem is gone"
        elif any(client.listener == key for client in self.clients.values()):
            reason = f"the controller at {subsystem.listeners[key].path} is in use: add a listener for each"
        elif self.poller_for(number).free_index() < 0:
            reason = f"{layout.CONTROLLERS} controllers are in use"
        if reason or subsystem is None:
            log.error("client %d refused: %s", number, reason)
            packet.close()
            # QEMU waits for an answer to its first message, and does not notice that the connection has ended.
            self._refused[number] = reason
            self.channel.send("take", client=number)
            return None
        client = Client(self, number, key, packet.fds[0], subsystem)
        client.open(*(areas or self._make_areas(number)))
        client.plane.set_trace(self._tracing)
        self.clients[number] = client
        self._attach(self._io_rows_of(client), subsystem)
        return client

    def _adoptable(self, packets: list[Packet]) -> Iterator[Packet]:
        """Clients to take up where the last worker left them, one of each listener.

        A new QEMU may have connected after the end of the last one, and nobody was there to see to that end. Of two
        clients the one with areas has been served last: an earlier one is done with, and a later one is new.
        """
        for packet in [packet for packet in packets if packet.fields["cut_off"]]:
            packets.remove(packet)
            self._settle_kept(packet)
        for position, packet in enumerate(packets):
            listener = packet.fields["listener"]
            later = [p for p in packets[position + 1 :] if p.fields["listener"] == listener]
            if any(self._keys(p.fields["client"])[1] in self._fds for p in later):
                packet.close()
                self.channel.send("drop", client=packet.fields["client"], reason="closed by the client")
            elif any(client.hung_up for client in self.clients.values() if client.listener == listener):
                self._adopted.append(packet)
            else:
                yield packet

    def _settle_kept(self, packet: Packet) -> None:
        """Count what a client that the keeper has cut off was served; "gone" follows, and nobody touches the rest."""
        number, subsystem = packet.fields["client"], self.target.subsystem_of(packet.fields["listener"])
        packet.close()
        fd = self._fds.get(self._keys(number)[0], -1)
        if fd >= 0 and subsystem is not None:
            fd = self._fds[self._keys(number)[0]] = self._current(number, fd)
            area = mmap.mmap(fd, layout.STATE_BYTES)
            spaces = np.frombuffer(area, layout.SPACE, layout.NAMESPACES, layout.SPACE_OFFSET).view(np.recarray)
            rows = [Row(number, nsid, 0, words) for nsid, words in enumerate(spaces, 1)]
            self._attach(rows, subsystem)
            self.target.iostat.settle(rows)
            self.target.commit_counts()

    def _attach(self, rows: list[Row], subsystem: Subsystem) -> None:
        for row in rows:
            if row.nsid in subsystem.by_nsid:  # attached or not: nothing is counted before it is
                self.target.iostat.attach(row, subsystem.backend(row.nsid).name)

    def _adopt_client(self, packet: Packet, others: list[Packet]) -> None:
        number = packet.fields["client"]
        state_fd, bar_fd = (self._fds.pop(key, -1) for key in self._keys(number))
        if bar_fd < 0 and state_fd >= 0:
            os.close(state_fd)
        client = self._client(packet, (self._current(number, state_fd), bar_fd) if bar_fd >= 0 else None)
        if client is None:
            return
        for other in others:
            fields = other.fields
            if other.op == "dma":
                fd = other.fds[0] if other.fds else None
                with contextlib.suppress(VfioUserError):  # a posted message that failed: the keeper cannot know
                    client.plane.adopt_dma(fields["iova"], fields["size"], fields["flags"], fields["offset"], fd)
                other.close()
            elif other.op == "irq":
                for i, fd in enumerate(other.fds):
                    client.adopt_vector(fields["index"], fields["start"] + i, fd)
        client.restore(packet.raw)
        self._starting.append((client, bool(packet.fields.get("taking"))))

    def _drop_orphans(self) -> None:
        """Areas of clients that are gone."""
        for key in [key for key in self._fds if key.startswith("controller/")]:
            os.close(self._fds.pop(key))
            self.unstash(key)

    async def _new_client(self, packet: Packet) -> None:
        listener = packet.fields["listener"]
        # A new QEMU may connect before the end of the last one has been seen to.
        while any(client.hung_up for client in self.clients.values() if client.listener == listener):
            await asyncio.sleep(CLOSE_POLL_S)
        if packet.fields["client"] not in self._coming:  # it has gone meanwhile
            packet.close()
            return
        self._coming.discard(packet.fields["client"])
        client = self._client(packet, None)
        if client is not None:
            client.start(taking=False)

    async def _gone(self, number: int) -> None:
        """A connection has ended."""
        self._coming.discard(number)
        self._refused.pop(number, None)
        client = self.clients.get(number)
        if client is not None:
            await client.close()
            self.target.iostat.settle(self._io_rows_of(client))
            controller = client.controller
            self.target.retire(number, client.subsystem, controller.cntlid, controller.life())
            self.target.commit_counts()
            del self.clients[number]
            for key in self._keys(number):
                self.unstash(key)
        self.target.forget(number)
        self.channel.send("forget", client=number)
        gc.collect()  # a controller is a ring of references that holds mappings and descriptors; see main()

    # ----------------------------------------------------------------------------------------- for the target

    def stash(self, key: str, fd: int) -> None:
        self.channel.send("stash", fds=[fd], key=key)

    def unstash(self, key: str) -> None:
        self.channel.send("unstash", key=key)
        if key.startswith(stash_key("")):
            self._trim_mappings()

    async def listen(self, key: str, path: str) -> None:
        await self._ask("listen", key, path=path)
        self._listeners[key] = path

    async def unlisten(self, key: str) -> None:
        self._listeners.pop(key, None)
        await self._ask("unlisten", key)
        for client in [client for client in self.clients.values() if client.listener == key]:
            await self._disconnect(client)

    async def settled(self) -> None:
        # The keeper does one thing after the other, and answers this one.
        with contextlib.suppress(OSError):
            await self._ask("unlisten", "")

    async def _ask(self, op: str, key: str, **fields: Any) -> None:
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._listening[key] = future
        self.channel.send(op, key=key, **fields)
        error = await future
        if error:
            raise OSError(error)

    async def _disconnect(self, client: Client) -> None:
        """Close a client's connection; ``gone`` follows and finds nothing left to do."""
        self.channel.send("drop", client=client.number, reason="its subsystem or listener was removed")
        await client.close()

    def commit(self, config: dict[str, Any]) -> None:
        self.config.commit(json.dumps(config, separators=(",", ":")).encode())

    def namespace_added(self, subsystem: Subsystem, nsid: int) -> None:
        self.spawn(self._fence(subsystem.backend(nsid)))
        namespace = subsystem.by_nsid[nsid]
        for client in self._clients_of(subsystem):
            if namespace.attached(client.controller.cntlid):
                client.serve(nsid)
                self._tell(client, nsid)

    async def namespace_changed(self, subsystem: Subsystem, nsid: int) -> None:
        for client in self._clients_of(subsystem):
            namespace = subsystem.by_nsid.get(nsid)
            wanted = namespace is not None and namespace.attached(client.controller.cntlid)
            size = (namespace.num_blocks, namespace.block_size) if namespace is not None and wanted else None
            if client.plane.serves(nsid) == size:
                continue
            async with client.plane.quiet():  # whoever is served on finds it there all the time
                if client.plane.serves(nsid):
                    await client.plane.clear_namespace(nsid)
                if wanted:
                    client.serve(nsid)
            self._tell(client, nsid)
        self._trim_mappings()

    @staticmethod
    def _tell(client: Client, nsid: int) -> None:
        controller = client.controller
        controller.namespace_changed(nsid)
        client.commit()
        if controller.state is State.READY and not controller.features.namespace_notices:
            warn(
                f"controller {controller.cntlid} of {client.subsystem.nqn} was not told that namespace {nsid} has "
                "changed: its host has not enabled Namespace Attribute Notices"
            )

    @contextlib.asynccontextmanager
    async def paused(self, subsystem: Subsystem) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            for client in self._clients_of(subsystem):
                await stack.enter_async_context(client.plane.quiet())
            yield

    def power_lost(self, subsystem: Subsystem) -> None:
        for client in self._clients_of(subsystem):
            client.fail("power was cut")

    async def subsystem_deleted(self, subsystem: Subsystem) -> None:
        for client in self._clients_of(subsystem):
            await self._disconnect(client)
        self._trim_mappings()

    def _clients_of(self, subsystem: Subsystem) -> list[Client]:
        return [client for client in self.clients.values() if client.subsystem is subsystem and not client.closed]

    def controllers(self) -> list[dict[str, Any]]:
        return [client.describe() for client in self.clients.values() if not client.closed]

    def stats(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "generation": self.generation,  # of the worker: the first is 1
            "code": jitcache.digest()[:16],
            "pauses": self._pauses,  # between workers, the newest last
            "pollers": [poller.describe() for poller in self.pollers],
            "threads": [[thread.name, thread.native_id] for thread in threading.enumerate()],
            "controllers": [client.stats() for client in self.clients.values() if not client.closed],
        }

    def io_rows(self, nqn: str | None = None) -> list[Row]:
        clients = [client for client in self.clients.values() if nqn in (None, client.subsystem.nqn)]
        return [row for client in clients for row in self._io_rows_of(client)]

    def _io_rows_of(self, client: Client) -> list[Row]:
        thread = self.pollers.index(client.plane.poller) + 1
        spaces = client.plane.spaces[: client.subsystem.max_namespaces]
        return [Row(client.number, nsid, thread, words) for nsid, words in enumerate(spaces, 1)]

    def reactors(self) -> list[dict[str, Any]]:
        return [self._reactor(number, poller) for number, poller in enumerate(self.pollers, 1)]

    def _reactor(self, number: int, poller: Poller) -> dict[str, Any]:
        """SPDK's row of one poller: busy is time on a CPU, idle the rest. lcore -1: it is bound to none."""
        tid, cpu_s = poller.thread()
        elapsed = now() - self._began
        busy = min(int(cpu_s * tick_rate()), elapsed)
        cpus = os.sched_getaffinity(tid)
        thread = {
            "name": f"poller_{number - 1:03}",
            "id": number,
            "cpumask": f"{sum(1 << cpu for cpu in cpus):x}",
            "elapsed": elapsed,
        }
        return {
            "lcore": -1 if poller.cpu is None else poller.cpu,
            "tid": tid,
            "busy": busy,
            "idle": elapsed - busy,
            "in_interrupt": True,  # without work it sleeps until it is woken
            "lw_threads": [thread],
        }

    async def trace_start(self, entries: int) -> None:
        if not _flag("DPU_EMU_STAMPS", 1) or not TRACEABLE:
            raise invalid("nothing can be traced with DPU_EMU_STAMPS=0 or DPU_EMU_TRACE=0")
        await self.trace_stop()
        for number, poller in enumerate(self.pollers):
            fd = os.memfd_create("trace", os.MFD_CLOEXEC)
            os.ftruncate(fd, layout.trace_bytes(entries))
            poller.make_trace(entries, fd)
            self.stash(f"trace/{number}", fd)
            os.close(fd)
        self._switch_trace(True)
        for client in self._open_clients():
            client.plane.set_trace(True)

    async def trace_stop(self) -> None:
        self._switch_trace(False)
        for client in self._open_clients():
            client.plane.set_trace(False)
        for poller in self.pollers:
            await poller.grace()

    def _switch_trace(self, on: bool) -> None:
        """The next worker does as this one."""
        self._tracing = on
        for poller in self.pollers:
            if poller.trace is not None:
                poller.trace[8:24].view(np.int64)[:] = on, layout.TRACE_SHAPE

    def _adopt_trace(self, number: int, poller: Poller) -> None:
        fd = self._fds.pop(f"trace/{number}", -1)
        if fd < 0:
            return
        on, its_shape = struct.unpack("qq", os.pread(fd, 16, 8))
        if its_shape == layout.TRACE_SHAPE:
            poller.make_trace((os.fstat(fd).st_size - layout.TRACE_HEADER) // layout.TRACE_BYTES, fd)
            self._tracing = bool(on)
        os.close(fd)

    def trace(self) -> list[trace.Part]:
        parts = []
        for poller in self.pollers:
            if poller.trace is not None:
                names = {client.number: client.subsystem.nqn for client in self._open_clients()}
                parts.append(trace.Part(*trace.records(poller.trace), names, self.pollers[0].to_ns))
        return parts

    def _open_clients(self) -> list[Client]:
        return [client for client in self.clients.values() if not client.closed]

    def clock(self) -> tuple[int, int]:
        return tick_rate(), now()

    def stop(self) -> None:
        self.channel.send("stop")

    async def prepare(self, command: Sequence[str], environment: dict[str, str]) -> None:
        await self._ask("prepare", "candidate", command=list(command), environment=environment)

    def change_over(self) -> None:
        self.channel.send("change_over")


async def serve(channel: Channel, health: Health) -> None:
    """The whole life of a worker in one event loop."""
    await Worker(channel, health).run()


def main() -> None:
    """Entry point of ``python -m dpu.worker``: the fork server, and each worker that is forked from it."""
    logging.basicConfig(level=logging.INFO, format="dpud[%(process)d] %(levelname)s %(name)s: %(message)s")
    compile_all()
    gc.freeze()  # what is here stays: a collection looks only at what came later
    mine = forkserver.serve(int(sys.argv[1]))
    if mine is not None:
        asyncio.run(serve(*mine))


if __name__ == "__main__":
    main()
