"""A worker without NVMe for the tests of the keeper: it speaks the channel and serves a device of memory.

Run by the keeper as its fork server. Tests steer it by JSON
lines over the RPC socket. Every command that changes something is appended to the file FAKE_LOG as it is
carried out, so a test sees how often that happened and by whom. It dies at the points of dpu.killpoint.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import select
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable
from typing import Any

from dpu import channel, forkserver
from dpu import killpoint as killpoint_module
from dpu.errors import VfioUserError
from dpu.killpoint import killpoint
from dpu.vfio_user import wire
from dpu.vfio_user.protocol import IrqInfo, RegionInfo, Session, Window

BAR_BYTES = wire.DATA_BYTES_MAX
DOORBELLS = 0x1000
FATAL_OFFSET = 0x666
DOORBELL_BYTES = 36


def record(**event: Any) -> None:
    with open(os.environ["FAKE_LOG"], "ab", buffering=0) as log:
        log.write(json.dumps({"pid": os.getpid(), **event}).encode() + b"\n")


class FakeDevice:
    def __init__(self, bar_fd: int) -> None:
        self.bar_fd = bar_fd
        self.dma: dict[int, dict[str, Any]] = {}
        self.vectors: dict[tuple[int, int], int] = {}
        flags = wire.RegionFlag.READ | wire.RegionFlag.WRITE
        self.regions = [RegionInfo(i, BAR_BYTES if i == 0 else 0, flags) for i in range(9)]
        self.regions[2] = RegionInfo(2, 8192, flags | wire.RegionFlag.MMAP, (Window(4096, 4096),), bar_fd)
        self.irqs = [IrqInfo(i, 300 if i == 2 else 1, wire.IrqFlag.EVENTFD) for i in range(5)]

    def negotiated(self, *, has_json: bool) -> None:
        pass

    async def region_read(self, region: int, offset: int, count: int) -> bytes:
        if count == BAR_BYTES:
            record(event="read all")
        return os.pread(self.bar_fd, count, offset).ljust(count, b"\0")

    async def region_write(self, region: int, offset: int, data: bytes, replayed: bool) -> None:
        record(event="write", offset=offset, data=data[:8].hex(), replayed=replayed)
        if offset == FATAL_OFFSET:
            os.kill(os.getpid(), signal.SIGSEGV)
        os.pwrite(self.bar_fd, data, offset)

    async def dma_map(self, iova: int, size: int, flags: int, offset: int, fd: int | None) -> None:
        if iova & 0xFFF:
            raise VfioUserError(errno.EINVAL)
        inode = os.fstat(fd).st_ino if fd is not None else None
        record(event="dma_map", iova=iova, inode=inode)
        self.dma[iova] = {"iova": iova, "size": size, "flags": flags, "offset": offset, "inode": inode}

    async def dma_unmap(self, iova: int, size: int) -> None:
        for key in [k for k, r in self.dma.items() if iova <= k and k + r["size"] <= iova + size]:
            del self.dma[key]

    async def set_irqs(self, index: int, start: int, count: int, fds: Any) -> None:
        record(event="set_irqs", index=index, start=start, count=count, fds=len(fds or ()))
        if fds is None:
            gone = [k for k in self.vectors if k[0] == index and (not count or start <= k[1] < start + count)]
            for key in gone:
                os.close(self.vectors.pop(key))
            return
        for i, fd in enumerate(fds):
            self.vectors[index, start + i] = os.dup(fd)

    async def reset(self, replayed: bool) -> None:
        record(event="reset", replayed=replayed)


class Client:
    def __init__(self, number: int, listener: str, fd: int, bar_fd: int) -> None:
        self.number = number
        self.listener = listener
        self.sock = socket.socket(fileno=fd)
        self.device = FakeDevice(bar_fd)
        self.session = Session(self.device)
        self.taking = False


class FakeWorker:
    def __init__(self, keeper: channel.Channel, health: channel.Health) -> None:
        self.channel = keeper
        self.health = health
        self.stash: dict[str, int] = {}
        self.listeners: dict[str, str] = {}
        self.clients: dict[int, Client] = {}
        self.rpc: socket.socket
        self.config: channel.ConfigStore
        self.generation = 0
        self.answers: list[dict[str, Any]] = []
        self.hung: set[str] = set()
        self.afterwards: list[Callable[[], None]] = []

    def run(self) -> None:
        killpoint("starting")
        self.channel.send("ready", pid=os.getpid())
        while (packet := self.channel.recv()) is not None and packet.op != "go":
            self.adopting(packet)
        if packet is None:
            return
        killpoint("adopted")
        if self.generation == int(os.environ.get("FAKE_HANG_GENERATION", "0")):
            signal.pause()
        self.channel.send("up")
        while True:
            self.turn()

    def adopting(self, packet: channel.Packet) -> None:
        fields = packet.fields
        killpoint("adopting")
        if packet.op == "adopt":
            self.generation = fields["generation"]
            self.rpc = socket.socket(fileno=packet.fds[0])
            self.config = channel.ConfigStore(packet.fds[1])
        elif packet.op == "fd":
            self.stash[fields["key"]] = packet.fds[0]
        elif packet.op == "listener":
            self.listeners[fields["key"]] = fields["path"]
        else:
            self.about_client(packet)

    def about_client(self, packet: channel.Packet) -> None:
        fields, number = packet.fields, packet.fields["client"]
        if packet.op == "client":
            key = f"bar/{number}"
            if key not in self.stash:
                self.stash[key] = os.memfd_create(key)
                os.ftruncate(self.stash[key], BAR_BYTES)
                self.channel.send("stash", key=key, fds=[self.stash[key]])
            client = Client(number, fields["listener"], packet.fds[0], self.stash[key])
            client.taking = fields["taking"]
            if packet.raw:
                client.session.restore(packet.raw)
            self.clients[number] = client
        elif packet.op == "dma":
            inode = os.fstat(packet.fds[0]).st_ino if packet.fds else None
            region = {k: fields[k] for k in ("iova", "size", "flags", "offset")}
            self.clients[number].device.dma[fields["iova"]] = {**region, "inode": inode}
            packet.close()
        elif packet.op == "irq":
            for i, fd in enumerate(packet.fds):
                self.clients[number].device.vectors[fields["index"], fields["start"] + i] = fd
        else:
            raise AssertionError(packet.op)

    def turn(self) -> None:
        poller = select.poll()
        poller.register(self.channel, select.POLLIN)
        poller.register(self.rpc, select.POLLIN)
        peeking = {c.sock.fileno(): c for c in self.clients.values() if not c.taking}
        for fd in peeking:
            poller.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poller.poll(20)}
        if "control" not in self.hung:
            self.health.beat()
        if self.channel.fileno() in ready:
            packet = self.channel.recv()
            if packet is None:
                sys.exit(0)
            self.serving(packet)
            return
        for fd in peeking.keys() & ready:
            self.peek(peeking[fd])
        if self.rpc.fileno() in ready:
            self.serve_rpc()

    def peek(self, client: Client) -> None:
        data = client.sock.recv(DOORBELL_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        header = wire.Header.from_buffer_copy(data.ljust(16, b"\0"))
        if len(data) == DOORBELL_BYTES == header.msg_size and header.cmd == wire.Command.REGION_WRITE:
            access = wire.RegionAccess.from_buffer_copy(data, 16)
            if access.region == 0 and access.offset >= DOORBELLS and header.flags & wire.HeaderFlag.NO_REPLY:
                os.pwrite(client.device.bar_fd, data[32:], access.offset)
                killpoint("doorbell_stored")
                client.sock.recv(DOORBELL_BYTES)
                return
        killpoint("before_take")
        client.taking = True
        self.channel.send("take", client=client.number)
        killpoint("after_take")

    def serving(self, packet: channel.Packet) -> None:
        fields = packet.fields
        if packet.op == "message":
            killpoint("received")
            client = self.clients[fields["client"]]
            assert client.taking
            if os.environ.get("FAKE_SERVING"):
                self.health.words[self.health.SERVING] = client.number
            coroutine = client.session.handle(packet.raw, packet.fds, replayed=fields["replayed"])
            reply = asyncio.run(coroutine)
            killpoint("executed")
            fds = list(client.session.reply_fds)
            if os.environ.get("FAKE_STALE_REPLIES"):
                self.channel.send("reply", client=client.number, seq=fields["seq"] - 1, raw=b"stale")
                self.channel.send("reply", client=client.number + 1000, seq=fields["seq"], raw=b"stale")
            client.taking = False
            self.channel.send("reply", client=client.number, seq=fields["seq"], raw=reply, fds=fds)
            killpoint("replied")
        elif packet.op == "gone":
            killpoint("gone")
            client = self.clients.pop(fields["client"])
            client.sock.close()
            for fd in client.device.vectors.values():
                os.close(fd)
            key = f"bar/{client.number}"
            os.close(self.stash.pop(key))
            self.channel.send("unstash", key=key)
            self.channel.send("forget", client=client.number)
            record(event="forgot", client=client.number)
        elif packet.op == "listening":
            self.answers.append(fields)
        elif packet.op == "pause":
            pass
        else:
            self.about_client(packet)

    def serve_rpc(self) -> None:
        try:
            connection = self.rpc.accept()[0]
        except BlockingIOError:
            return
        with connection:
            line = connection.makefile().readline()
            if not line:
                return  # somebody only looked whether the socket is alive
            request = json.loads(line)
            answer = getattr(self, "rpc_" + request.pop("op"))(**request)
            connection.sendall(json.dumps(answer).encode() + b"\n")
        while self.afterwards:
            self.afterwards.pop()()
        if self.hung & {"all"}:
            while True:
                time.sleep(100)

    def rpc_state(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "generation": self.generation,
            "stash": {k: self.text(fd) for k, fd in self.stash.items()},
            "listeners": self.listeners,
            "config": self.config.load().decode(),
            "kill_point": killpoint_module.NAME,
            "clients": {
                c.number: {
                    "dma": list(c.device.dma.values()),
                    "vectors": sorted(map(list, c.device.vectors)),
                    "capabilities": c.session.capabilities,
                }
                for c in self.clients.values()
            },
        }

    @staticmethod
    def text(fd: int) -> str:
        return os.pread(fd, 64, 0).decode("latin1") if stat.S_ISREG(os.fstat(fd).st_mode) else "socket"

    def _awaited(self, op: str, **fields: Any) -> dict[str, Any]:
        self.channel.send(op, **fields)
        while not self.answers:
            packet = self.channel.recv()
            assert packet is not None
            self.serving(packet)
        return self.answers.pop()

    def rpc_listen(self, key: str, path: str) -> dict[str, Any]:
        answer = self._awaited("listen", key=key, path=path)
        if not answer["error"]:
            self.listeners[key] = path
        return answer

    def rpc_unlisten(self, key: str) -> dict[str, Any]:
        self.listeners.pop(key, None)
        return self._awaited("unlisten", key=key)

    def rpc_stash(self, key: str, text: str) -> dict[str, Any]:
        fd = os.memfd_create(key)
        os.write(fd, text.encode())
        self.stash[key] = fd
        self.channel.send("stash", key=key, fds=[fd])
        return {}

    def rpc_unstash(self, key: str) -> dict[str, Any]:
        os.close(self.stash.pop(key))
        self.channel.send("unstash", key=key)
        return {}

    def rpc_commit(self, text: str) -> dict[str, Any]:
        self.config.commit(text.encode())
        return {}

    def rpc_fire(self, client: int, index: int, vector: int) -> dict[str, Any]:
        os.eventfd_write(self.clients[client].device.vectors[index, vector], 1)
        return {}

    def rpc_drop(self, client: int) -> dict[str, Any]:
        self.channel.send("drop", client=client, reason="a test wants it")
        return {}

    def rpc_send(self, client: int, size: int, count: int) -> dict[str, Any]:
        for _ in range(count):
            self.channel.send("send", client=client, raw=bytes(size))
        return {}

    def rpc_hang(self, what: str) -> dict[str, Any]:
        """What: "control": no heartbeat; "poller": a poller that stands still; "all": nothing goes on."""
        self.hung.add(what)
        if what == "poller":
            self.health.words[self.health.POLLERS] = 1
        return {}

    def rpc_stop(self) -> dict[str, Any]:
        self.afterwards.append(lambda: self.channel.send("stop"))
        return {}

    def rpc_burst(self, count: int) -> dict[str, Any]:
        """Send ``count`` packets, and die."""
        for number in range(count):
            self.channel.send("stash", key=f"burst/{number}", fds=[self.rpc.fileno()])
        os.kill(os.getpid(), signal.SIGKILL)
        return {}

    def rpc_nonsense(self) -> dict[str, Any]:
        self.afterwards.append(lambda: self.channel.send("reply", raw=b"what"))
        return {}


if __name__ == "__main__":
    if os.environ.get("FAKE_FAIL"):
        sys.exit("no such luck")
    mine = forkserver.serve(int(sys.argv[1]))
    if mine is not None:
        FakeWorker(*mine).run()
