"""What is fuzzed: each target takes any bytes, drives real code with them, and asserts what must always hold.

Use: ``TARGETS[name](data)``; run.py lets atheris choose the bytes, test_fuzz.py replays the corpus.

vfio_user  a stream of messages in pieces: the keeper's reader and tables, the worker's session, the DMA map
sqe        admin commands on a controller; I/O commands on the plain build of the asic, with any PRPs and PRP lists
rpc        a stream of JSON-RPC requests in pieces: splitter, parser, decoding of every method's parameters

No target opens what its bytes name, and none keeps anything from one input to the next but memory that it clears.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import itertools
import json
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from dpu.backends import Marks
from dpu.channel import close_fds
from dpu.errors import VfioUserError
from dpu.fastpath.jit import JIT
from dpu.guestmap import GuestMap
from dpu.nvme import io
from dpu.nvme.interfaces import Completion
from dpu.rpc.dispatcher import Dispatcher, When
from dpu.rpc.framing import FramingError, Splitter
from dpu.rpc.methods import dispatcher
from dpu.target import Target
from dpu.vfio_user import wire
from dpu.vfio_user.keeping import Message, MessageReader, StreamError, Tables, failed, refusal
from dpu.vfio_user.pci_config import CONFIG_BYTES, PciConfig
from dpu.vfio_user.protocol import IrqInfo, RegionInfo, Session
from tests.support import nvme_host
from tests.support.nvme_driver import PAGE
from tests.support.rpc_host import FakeHost
from tests.unit.asic_lab import PLAIN, PRODUCT, Kept, Lab


class Bytes:
    """Decisions out of the input; zeroes when it is used up."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def left(self) -> int:
        return max(len(self._data) - self._at, 0)

    def take(self, count: int) -> bytes:
        part = self._data[self._at : self._at + count]
        self._at += count
        return part.ljust(count, b"\0")

    def number(self, count: int = 1) -> int:
        return int.from_bytes(self.take(count), "little")


# ---------------------------------------------------------------------------------------------------- vfio-user


class Device:
    """A device with PCI configuration and a DMA map, as dpu.session's; its other regions are memory."""

    def __init__(self) -> None:
        self.pci, self.memory = PciConfig(65), GuestMap()
        flags = wire.RegionFlag.READ | wire.RegionFlag.WRITE
        sizes = {0: 0x2000, 4: 0x1000, 7: CONFIG_BYTES}
        self.regions: Sequence[RegionInfo] = [
            RegionInfo(index, sizes.get(index, 0), flags if index in sizes else 0) for index in range(9)
        ]
        self.irqs: Sequence[IrqInfo] = [IrqInfo(index, 65 if index == 2 else 0, 1) for index in range(5)]

    def negotiated(self, *, has_json: bool) -> None:
        pass

    async def region_read(self, region: int, offset: int, count: int) -> bytes:
        assert offset + count <= self.regions[region].size
        return self.pci.read(offset, count) if region == 7 else bytes(count)

    async def region_write(self, region: int, offset: int, data: bytes, replayed: bool) -> None:
        assert offset + len(data) <= self.regions[region].size
        if region == 7:
            self.pci.write(offset, data)

    async def dma_map(self, iova: int, size: int, flags: int, offset: int, fd: int | None) -> None:
        self.memory.map(iova, size, flags, offset, fd)
        ends = [(one.iova, one.iova + one.size) for one in self.memory.regions]
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends)), "regions overlap"

    async def dma_unmap(self, iova: int, size: int) -> None:
        self.memory.unmap(iova, size)
        self.memory.trim()

    async def set_irqs(self, index: int, start: int, count: int, fds: Sequence[int] | None) -> None:
        assert start + count <= self.irqs[index].count
        if fds is not None and len(fds) not in (0, count):
            raise VfioUserError(errno.EINVAL, "descriptors")

    async def reset(self, replayed: bool) -> None:
        self.pci.reset()


def _ram() -> int:
    fd = os.memfd_create("fuzz", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 16 * PAGE)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


_VERSION: Final = wire.message(0, wire.Command.VERSION, struct.pack("<HH", 0, 1) + b'{"capabilities":{}}\0')


def vfio_user(data: bytes) -> None:
    choices = Bytes(data)
    how = choices.number()
    stream = bytearray(_VERSION if how & 1 else b"")
    stream += choices.take(choices.left) if choices.left else b""
    device, reader, tables = Device(), MessageReader(), Tables()
    session = Session(device)
    ram, event = _ram(), os.eventfd(0)
    used = len(os.listdir("/proc/self/fd"))
    try:
        while stream:
            piece = min(reader.want, len(stream), 1 + how % 97)
            fds = [os.dup(ram if how & 2 else event)] if how & 4 and not reader.partial else []
            try:
                message = reader.feed(bytes(stream[:piece]), fds)
            except StreamError:
                break
            del stream[:piece]
            if message is not None:
                _one_message(session, tables, message)
        reader.close()
        tables.close()
        assert len(os.listdir("/proc/self/fd")) <= used, "a descriptor is lost"
    finally:
        device.memory.close()
        os.close(ram)
        os.close(event)


def _one_message(session: Session, tables: Tables, message: Message) -> None:
    """As the keeper does it: refused by itself, or answered by the worker and then recorded."""
    header = wire.Header.from_buffer_copy(message.raw)
    if refusal(message) or tables.full(message):
        close_fds(message.fds)
        return
    reply = asyncio.run(session.handle(message.raw, [os.dup(fd) for fd in message.fds]))
    if reply:
        answer = wire.Header.from_buffer_copy(reply)
        assert (answer.msg_id, answer.cmd, answer.msg_size) == (header.msg_id, header.cmd, len(reply))
        assert answer.flags & 0xF == wire.HeaderFlag.REPLY
        assert bool(answer.flags & wire.HeaderFlag.ERROR) == bool(answer.error_no) == failed(reply)
    else:
        assert header.flags & wire.HeaderFlag.NO_REPLY
    close_fds(session.reply_fds)
    if failed(reply):
        close_fds(message.fds)
    else:
        tables.commit(message)


# --------------------------------------------------------------------------------------------------- SQE and PRP


class Board:
    """A subsystem whose back ends are those of ``Kept``."""

    def __init__(self, kept: Kept) -> None:
        self._kept = kept
        self.by_nsid = kept.backends

    def backend(self, nsid: int) -> Any:
        return self._kept.backends[nsid]


_kept: Kept | None = None


def sqe(data: bytes) -> None:
    choices = Bytes(data)
    if choices.number() & 1:
        _admin(choices)
    else:
        _io(choices)


def _admin(choices: Bytes) -> None:
    """Up to eight admin commands; the state can be saved and loaded after each."""
    host = nvme_host.Host()
    host.memory.data[0x10000:0x14000] = choices.take(min(choices.left // 2, 0x4000)).ljust(0x4000, b"\0")
    for token in range(8):
        if not choices.left:
            return
        raw = bytearray(choices.take(64))
        raw[0] &= 0x0F if raw[1] & 0x80 else 0xFF
        raw[24:40] = struct.pack("<QQ", *(_address(int.from_bytes(raw[at : at + 8], "little")) for at in (24, 32)))
        completion = nvme_host.run(host.controller.execute(token, bytes(raw)))
        assert completion is not None or raw[0] == 0x0C, "only an event request may wait"
        assert completion is None or 0 <= completion.status < 1 << 15
        host.next_worker()


def _address(value: int) -> int:
    """A guest address near what is mapped, or as it is: by its lowest bits, which then mean nothing."""
    return value if value & 3 == 3 else (value >> 8) % (nvme_host.RAM_BYTES + 4 * PAGE) & ~(0 if value & 4 else 0xFFF)


def _io(choices: Bytes) -> None:
    """Up to twelve I/O commands at once: each completes once, and nothing beside guest memory is touched."""
    global _kept
    _kept = _kept or Kept()
    kept = _kept
    kept.cqs.clear()
    kept.sqs.clear()
    engine = PLAIN if JIT else PRODUCT
    base, _, size = kept.ram.windows[0]
    kept.ram.free(base, size)
    kept.ram._free = [(base, size)]
    with Lab(kept, engine) as lab:
        lab.begin()
        lab.plane.cqs[1].epoch = lab.plane.sqs[1].epoch = 0  # the queues of the last input are not these
        queue = lab.open_pair(1, 16)
        base, size = base + 2 * PAGE, size - 2 * PAGE  # a guest that reads into its own queues spoils them
        # Lists of PRPs: entries that are mostly pages of guest memory.
        lists = kept.ram.alloc(4 * PAGE)
        words = kept.ram.view(lists, 4 * PAGE).cast("Q")
        for index in range(min(choices.left // 16, len(words))):
            words[index] = _iova(base, size, choices.number(8))
        count = 0
        for _ in range(12):
            if not choices.left:
                break
            raw = bytearray(choices.take(64))
            raw[2:4] = struct.pack("<H", count)
            raw[4:8] = struct.pack("<I", raw[4] % 10 or 0xFFFFFFFF)
            raw[24:40] = struct.pack(
                "<QQ", *(_iova(base, size, int.from_bytes(raw[at : at + 8], "little")) for at in (24, 32))
            )
            if raw[5] & 1:  # an LBA that can be
                raw[40:48] = struct.pack("<Q", int.from_bytes(raw[40:42], "little") % 2049)
            queue.area[64 * queue.tail : 64 * queue.tail + 64] = raw
            queue.tail = (queue.tail + 1) % queue.entries
            count += 1
        queue.ring()
        done: list[int] = []
        for _ in range(4):
            lab.settle()
            for slot in lab.misses():
                lab.plane.finish(slot, _by_control(kept, lab, slot))
            done += [one.cid for one in queue.cq.reap()]
        assert sorted(done) == list(range(count)), (done, count)
        assert int(lab.plane.record.free_count) == len(lab.plane._free)
    kept.ram.check_canaries()
    for backend in kept.backends.values():
        if backend.marks is not None:
            backend.marks.close()
            backend.marks = None


def _by_control(kept: Kept, lab: Lab, slot: int) -> Completion:
    raw = lab.plane.sqe(slot)
    backend = kept.backends[int.from_bytes(raw[4:8], "little")]
    if raw[0] == 0x04 and backend.marks is None and backend.num_blocks < 1 << 30:
        backend.marks = Marks.create(backend.num_blocks)
        lab.plane.set_marks(int.from_bytes(raw[4:8], "little"))
    board: Any = Board(kept)
    return asyncio.run(io.execute(raw, lab.plane.memory, board, False))


def _iova(base: int, size: int, value: int) -> int:
    return value if value & 3 == 3 else base + ((value >> 8) % (size + 4 * PAGE) & ~(0 if value & 4 else 0xFFF))


# -------------------------------------------------------------------------------------------------------- JSON-RPC


async def _called(**parameters: Any) -> bool:
    json.dumps(parameters, default=repr)
    return True


def _dispatcher() -> Dispatcher:
    whole = dispatcher(Target(FakeHost()))
    return Dispatcher(
        {name: replace(method, call=_called, when=When.ALWAYS) for name, method in whole.methods.items()}
    )


_rpc: Dispatcher | None = None


def rpc(data: bytes) -> None:
    """Answers are JSON-RPC; how the stream is cut does not matter."""
    global _rpc
    _rpc = _rpc or _dispatcher()
    size = 1 + data[0] if data else 1
    pieces = [data[at : at + size] for at in range(1, len(data), size)]
    values, failed = _values(pieces)
    assert (values, failed) == _values([data[1:]])
    wanted = _decoded(data[1:])
    assert values[: len(wanted)] == wanted[: len(values)] and (failed or len(values) >= len(wanted))
    for text in values:
        with contextlib.suppress(FramingError):
            answer = asyncio.run(_rpc.answer(text))
            if answer.text:
                reply = json.loads(answer.text)
                for one in reply if isinstance(reply, list) else [reply]:
                    assert one["jsonrpc"] == "2.0" and ("result" in one) != ("error" in one) and "id" in one
                    assert "error" not in one or isinstance(one["error"]["code"], int)


def _values(pieces: Sequence[bytes]) -> tuple[list[bytes], bool]:
    splitter, found = Splitter(), []
    try:
        for piece in pieces:
            splitter.feed(piece)
            while (value := splitter.next_value()) is not None:
                found.append(value)
    except FramingError:
        return found, True
    return found, False


def _decoded(data: bytes) -> list[bytes]:
    """The objects and arrays at the start of a stream, by Python's own decoder."""
    found: list[bytes] = []
    with contextlib.suppress(ValueError, RecursionError):
        text, at = data.decode(), 0
        while True:
            at += len(text[at:]) - len(text[at:].lstrip(" \t\r\n"))
            if text[at : at + 1] not in ("{", "["):
                break
            _, end = json.JSONDecoder().raw_decode(text, at)
            found.append(text[at:end].encode())
            at = end
    return found


TARGETS: Final[dict[str, Callable[[bytes], None]]] = {"vfio_user": vfio_user, "sqe": sqe, "rpc": rpc}
