"""vfio-user without sockets: the session byte by byte (layouts packed here by hand from the specification),
and what the keeper knows of the protocol."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import struct
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpu.errors import VfioUserError
from dpu.vfio_user import keeping, protocol, wire
from dpu.vfio_user.keeping import Message, MessageReader, StreamError, Tables
from dpu.vfio_user.protocol import IrqInfo, RegionInfo, Session, Window

# Numbers of the specification, written down a second time.
VERSION, DMA_MAP, DMA_UNMAP, GET_INFO, REGION_INFO, IO_FDS, IRQ_INFO, SET_IRQS = range(1, 9)
REGION_READ, REGION_WRITE, DMA_READ, DMA_WRITE, RESET = range(9, 14)
REPLY, NO_REPLY, ERROR = 1, 0x10, 0x20

QEMU_CAPABILITIES = {
    "pgsizes": 4096,
    "max_msg_fds": 16,
    "max_dma_maps": 65535,
    "max_data_xfer_size": 1048576,
    "migration": {"pgsize": 4096, "max_bitmap_size": 268435456},
    "write_multiple": True,
}


def msg(cmd: int, payload: bytes = b"", flags: int = 0, msg_id: int = 7) -> bytes:
    return struct.pack("<HHIII", msg_id, cmd, 16 + len(payload), flags, 0) + payload


def short(value: object) -> str | None:
    """Test id of a message."""
    return f"{len(value)}-bytes" if isinstance(value, bytes) else None


def version(data: bytes | dict[str, Any] = b"", major: int = 0, minor: int = 0) -> bytes:
    if isinstance(data, dict):
        data = json.dumps(data).encode() + b"\0"
    return msg(VERSION, struct.pack("<HH", major, minor) + data)


def access(region: int, offset: int, count: int) -> bytes:
    return struct.pack("<QII", offset, region, count)


class Recorder:
    """A device that remembers what it was asked, and fails when told to."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.failure: Exception | None = None
        rw = 3
        self.regions: list[RegionInfo] = [RegionInfo(i) for i in range(9)]
        self.regions[0] = RegionInfo(0, 0x4000, rw)
        self.regions[1] = RegionInfo(1, 0x100, 1)
        self.regions[2] = RegionInfo(2, 0x3000, rw | 4, (Window(0x1000, 0x1000), Window(0x2000, 0x1000)), 1, 64)
        self.regions[7] = RegionInfo(7, 0x1000, rw)
        self.irqs = [IrqInfo(0), IrqInfo(1), IrqInfo(2, 65, 1), IrqInfo(3, 1, 1), IrqInfo(4, 1, 1)]

    def call(self, *arguments: Any) -> None:
        self.calls.append(arguments)
        if self.failure:
            raise self.failure

    def negotiated(self, *, has_json: bool) -> None:
        self.has_json = has_json

    async def region_read(self, region: int, offset: int, count: int) -> bytes:
        self.call("read", region, offset, count)
        return bytes((offset + i) & 0xFF for i in range(count))

    async def region_write(self, region: int, offset: int, data: bytes, replayed: bool) -> None:
        self.call("write", region, offset, data, replayed)

    async def dma_map(self, iova: int, size: int, flags: int, offset: int, fd: int | None) -> None:
        self.call("map", iova, size, flags, offset, fd is not None and os.fstat(fd).st_ino)

    async def dma_unmap(self, iova: int, size: int) -> None:
        self.call("unmap", iova, size)

    async def set_irqs(self, index: int, start: int, count: int, fds: Sequence[int] | None) -> None:
        self.call("irqs", index, start, count, fds and len(fds))

    async def reset(self, replayed: bool) -> None:
        self.call("reset", replayed)


class Peer:
    """A session over a recorder; ``ask`` gives (errno, payload) after checking the reply's header."""

    def __init__(self, greeting: bytes | None = None) -> None:
        self.device = Recorder()
        self.session = Session(self.device)
        if greeting is None:
            greeting = version({"capabilities": QEMU_CAPABILITIES})
        if greeting:
            self.handle(greeting)

    def handle(self, message: bytes, fds: Sequence[int] = (), **options: bool) -> bytes:
        return asyncio.run(self.session.handle(message, fds, **options))

    def ask(self, message: bytes, fds: Sequence[int] = (), **options: bool) -> tuple[int, bytes]:
        reply = self.handle(message, fds, **options)
        msg_id, cmd, size, flags, error_no = struct.unpack_from("<HHIII", reply)
        assert (msg_id, cmd) == struct.unpack_from("<HH", message.ljust(16, b"\0"))
        assert size == len(reply)
        assert flags == (REPLY | ERROR if error_no else REPLY)
        assert not error_no or size == 16, "an error reply is a header only"
        return error_no, reply[16:]


@pytest.fixture
def peer() -> Peer:
    return Peer()


EINVAL = (errno.EINVAL, b"")


# ---------------------------------------------------------------------------------------------- negotiation


def test_version_with_qemus_capabilities() -> None:
    peer = Peer(b"")
    request = version({"capabilities": QEMU_CAPABILITIES})
    error_no, payload = peer.ask(request)
    assert error_no == 0 and len(payload) + 16 <= len(request)
    assert payload[:4] == bytes(4) and payload[-1:] == b"\0"
    ours = json.loads(payload[4:-1])["capabilities"]
    assert ours == {"max_msg_fds": 16, "max_data_xfer_size": 65536, "pgsizes": 4096, "max_dma_maps": 65535}
    assert peer.session.capabilities == QEMU_CAPABILITIES and peer.session.has_json


def test_version_of_four_bytes() -> None:
    peer = Peer(b"")
    assert peer.ask(version(minor=1)) == (0, bytes(4))  # SPDK's initiator proposes 0.1
    assert peer.session.capabilities == {} and not peer.session.has_json
    assert peer.ask(msg(GET_INFO, struct.pack("<IIII", 16, 0, 0, 0)))[0] == 0


def test_version_with_little_room_still_limits_transfers() -> None:
    _, payload = Peer(b"").ask(version({"capabilities": {"max_msg_fds": 1, "x": "padding"}}))
    assert json.loads(payload[4:-1]) == {"capabilities": {"max_data_xfer_size": 65536}}


@pytest.mark.parametrize(
    "request_",
    [
        msg(VERSION),
        msg(VERSION, bytes(3)),
        version(major=1),
        version(b'{"capabilities":{}}'),  # no NUL
        version(b"\xff\0"),
        version(b"[]\0"),
        version(b'{"capabilities":[]}\0'),
        version(b"[" * 60000 + b"\0"),
        version(b'{"x":' + b"9" * 5000 + b"}\0"),
    ],
    ids=short,
)
def test_a_bad_version_is_refused_and_can_be_corrected(request_: bytes) -> None:
    peer = Peer(b"")
    assert peer.ask(request_) == EINVAL
    assert peer.ask(msg(RESET)) == EINVAL
    assert peer.ask(version())[0] == 0


def test_version_comes_first_and_once(peer: Peer) -> None:
    assert peer.ask(version()) == EINVAL
    early = Peer(b"")
    for cmd in (DMA_MAP, GET_INFO, REGION_READ, RESET):
        assert early.ask(msg(cmd, bytes(64))) == EINVAL
    assert early.device.calls == []


def test_a_restored_session_goes_on() -> None:
    peer = Peer(b"")
    peer.session.restore(version({"capabilities": QEMU_CAPABILITIES}))
    assert peer.session.capabilities == QEMU_CAPABILITIES and peer.session.has_json
    assert peer.ask(msg(RESET), replayed=True) == (0, b"")
    assert peer.device.calls == [("reset", True)]


# --------------------------------------------------------------------------------------------------- header


@pytest.mark.parametrize("cmd", [IO_FDS, DMA_READ, DMA_WRITE, 15, 16, 17, 18])
def test_known_commands_that_are_not_offered(peer: Peer, cmd: int) -> None:
    assert peer.ask(msg(cmd, bytes(32))) == (errno.EOPNOTSUPP, b"")


@pytest.mark.parametrize("cmd", [0, 14, 19, 0xFFFF])
def test_unknown_commands(peer: Peer, cmd: int) -> None:
    assert peer.ask(msg(cmd, bytes(32))) == (errno.ENOSYS, b"")


@pytest.mark.parametrize("flags", [1, 2, 0xF, 0x20, 0x21])
def test_what_is_no_command(peer: Peer, flags: int) -> None:
    assert peer.ask(msg(RESET, flags=flags)) == EINVAL
    assert peer.device.calls == []


@pytest.mark.parametrize("size", [0, 15, 17, 1 << 31])
def test_the_size_in_the_header_must_be_true(peer: Peer, size: int) -> None:
    reply = peer.handle(struct.pack("<HHIII", 1, RESET, size, 0, 0))
    assert struct.unpack("<HHIII", reply) == (1, RESET, 16, REPLY | ERROR, errno.EINVAL)


def test_no_reply_means_none(peer: Peer) -> None:
    assert peer.handle(msg(REGION_WRITE, access(0, 8, 4) + b"abcd", NO_REPLY)) == b""
    assert peer.handle(msg(REGION_WRITE, access(0, 0x4000, 4) + b"abcd", NO_REPLY)) == b""
    assert peer.device.calls == [("write", 0, 8, b"abcd", False)]


# -------------------------------------------------------------------------------------------- information


def test_device_info(peer: Peer) -> None:
    assert peer.ask(msg(GET_INFO, struct.pack("<IIII", 16, 0, 0, 0))) == (0, struct.pack("<IIII", 16, 3, 9, 5))
    assert peer.ask(msg(GET_INFO, struct.pack("<IIII", 15, 0, 0, 0))) == EINVAL
    assert peer.ask(msg(GET_INFO, bytes(15))) == EINVAL


def region_info(argsz: int, index: int, tail: bytes = b"") -> bytes:
    return msg(REGION_INFO, struct.pack("<IIIIQQ", argsz, 0, index, 0, 0, 0) + tail)


def test_region_info_without_windows(peer: Peer) -> None:
    expected = (0, struct.pack("<IIIIQQ", 32, 3, 0, 0, 0x4000, 0))
    assert peer.ask(region_info(32, 0)) == expected
    assert peer.ask(region_info(4064, 0, bytes(4064 - 32))) == expected  # SPDK's initiator
    assert peer.session.reply_fds == ()
    assert peer.ask(region_info(32, 8)) == (0, struct.pack("<IIIIQQ", 32, 0, 8, 0, 0, 0))
    for bad in (region_info(31, 0), region_info(32, 9), region_info(32, 1 << 31), msg(REGION_INFO, bytes(31))):
        assert peer.ask(bad) == EINVAL


def test_region_info_with_windows_is_asked_for_twice(peer: Peer) -> None:
    total = 32 + 16 + 2 * 16
    # QEMU refuses a capability offset below the structure's size, also in an answer without room for capabilities.
    assert peer.ask(region_info(32, 2)) == (0, struct.pack("<IIIIQQ", total, 0xF, 2, 32, 0x3000, 64))
    assert peer.session.reply_fds == (1,)
    error_no, payload = peer.ask(region_info(total, 2))
    assert (error_no, payload[:32]) == (0, struct.pack("<IIIIQQ", total, 0xF, 2, 32, 0x3000, 64))
    # struct vfio_info_cap_header, then vfio_region_info_cap_sparse_mmap
    assert payload[32:48] == struct.pack("<HHIII", 1, 1, 0, 2, 0)
    assert payload[48:] == struct.pack("<QQQQ", 0x1000, 0x1000, 0x2000, 0x1000)
    assert peer.session.reply_fds == (1,)
    peer.ask(msg(RESET))
    assert peer.session.reply_fds == ()


def test_irq_info(peer: Peer) -> None:
    assert peer.ask(msg(IRQ_INFO, struct.pack("<IIII", 16, 0, 2, 0))) == (0, struct.pack("<IIII", 16, 1, 2, 65))
    assert peer.ask(msg(IRQ_INFO, struct.pack("<IIII", 16, 0, 5, 0))) == EINVAL
    assert peer.ask(msg(IRQ_INFO, struct.pack("<IIII", 8, 0, 2, 0))) == EINVAL


# ------------------------------------------------------------------------------------------------ interrupts


def irqs(flags: int, index: int, start: int, count: int, data: bytes = b"", argsz: int = 20) -> bytes:
    return msg(SET_IRQS, struct.pack("<IIIII", argsz, flags, index, start, count) + data)


def eventfds(count: int) -> list[int]:
    return [os.eventfd(0) for _ in range(count)]


def test_set_irqs_as_qemu_does(peer: Peer) -> None:
    assert peer.ask(irqs(0x24, 2, 0, 3), eventfds(3)) == (0, b"")
    assert peer.ask(irqs(0x24, 2, 64, 1)) == (0, b"")
    assert peer.ask(irqs(0x21, 2, 0, 0)) == (0, b"")
    assert peer.device.calls == [("irqs", 2, 0, 3, 3), ("irqs", 2, 64, 1, None), ("irqs", 2, 0, 0, None)]


@pytest.mark.parametrize(
    ("request_", "fds", "error_no"),
    [
        (irqs(0x24, 2, 0, 3), 2, errno.EINVAL),
        (irqs(0x24, 2, 63, 3), 3, errno.EINVAL),
        (irqs(0x24, 2, 0xFFFFFFFF, 2), 2, errno.EINVAL),
        (irqs(0x24, 5, 0, 1), 1, errno.EINVAL),
        (irqs(0x24, 0, 0, 1), 1, errno.EINVAL),  # no INTx vectors
        (irqs(0x24, 2, 0, 0), 0, errno.EINVAL),
        (irqs(0x21, 2, 0, 0), 1, errno.EINVAL),
        (irqs(0x21, 2, 1, 0), 0, errno.EINVAL),
        (irqs(0x24, 2, 0, 1, argsz=19), 1, errno.EINVAL),
        (irqs(0x24, 2, 0, 1, data=b"x"), 1, errno.EINVAL),
        (irqs(0x22, 2, 0, 4, data=b"xxx"), 0, errno.EINVAL),
        (irqs(0x26, 2, 0, 1), 1, errno.EINVAL),
        (irqs(0x34, 2, 0, 1), 1, errno.EINVAL),
        (irqs(0x20, 2, 0, 0), 0, errno.EINVAL),
        (irqs(0x04, 2, 0, 1), 1, errno.EINVAL),
        (irqs(0x64, 2, 0, 1), 1, errno.EINVAL),
        (msg(SET_IRQS, bytes(19)), 0, errno.EINVAL),
        (irqs(0x21, 2, 0, 1), 0, errno.EOPNOTSUPP),
        (irqs(0x22, 2, 0, 1, data=b"\1"), 0, errno.EOPNOTSUPP),
        (irqs(0x09, 2, 0, 1), 0, errno.EOPNOTSUPP),
        (irqs(0x11, 2, 0, 1), 0, errno.EOPNOTSUPP),
    ],
    ids=short,
)
def test_bad_irq_sets(peer: Peer, request_: bytes, fds: int, error_no: int) -> None:
    assert peer.ask(request_, eventfds(fds)) == (error_no, b"")
    assert peer.device.calls == []


# ---------------------------------------------------------------------------------------------------- memory


def dma_map(iova: int, size: int, flags: int = 3, offset: int = 0, argsz: int = 32) -> bytes:
    return msg(DMA_MAP, struct.pack("<IIQQQ", argsz, flags, offset, iova, size))


def dma_unmap(iova: int, size: int, flags: int = 0, argsz: int = 24) -> bytes:
    return msg(DMA_UNMAP, struct.pack("<IIQQ", argsz, flags, iova, size))


def test_dma(peer: Peer) -> None:
    fd = os.memfd_create("ram")
    inode = os.fstat(fd).st_ino
    assert peer.ask(dma_map(0x1000, 0x2000, offset=0x3000), [fd]) == (0, b"")
    assert peer.ask(dma_map((1 << 64) - 4096, 4096, flags=1)) == (0, b"")
    assert peer.ask(dma_unmap(0x1000, 0x2000)) == (0, struct.pack("<IIQQ", 24, 0, 0x1000, 0x2000))
    assert peer.ask(dma_unmap(0, 0, flags=2))[0] == 0
    assert peer.device.calls == [
        ("map", 0x1000, 0x2000, 3, 0x3000, inode),
        ("map", (1 << 64) - 4096, 4096, 1, 0, False),
        ("unmap", 0x1000, 0x2000),
        ("unmap", 0, 1 << 64),
    ]


@pytest.mark.parametrize(
    ("request_", "fds", "error_no"),
    [
        (dma_map(0, 0), 0, errno.EINVAL),
        (dma_map((1 << 64) - 4096, 4097), 0, errno.EINVAL),
        (dma_map(0, 8192, offset=(1 << 64) - 4096), 1, errno.EINVAL),
        (dma_map(0, 4096, flags=0x10), 0, errno.EINVAL),
        (dma_map(0, 4096, argsz=31), 0, errno.EINVAL),
        (dma_map(0, 4096), 2, errno.EINVAL),
        (msg(DMA_MAP, bytes(31)), 0, errno.EINVAL),
        (msg(DMA_MAP, bytes(33)), 0, errno.EINVAL),
        (dma_unmap(0, 0), 0, errno.EINVAL),
        (dma_unmap(0, 4096, flags=2), 0, errno.EINVAL),
        (dma_unmap(0, 4096, flags=4), 0, errno.EINVAL),
        (dma_unmap(4096, (1 << 64) - 1), 0, errno.EINVAL),
        (dma_unmap(0, 4096, argsz=23), 0, errno.EINVAL),
        (dma_unmap(0, 4096), 1, errno.EINVAL),
        (dma_unmap(0, 4096, flags=1), 0, errno.EOPNOTSUPP),
        (msg(DMA_UNMAP, bytes(23)), 0, errno.EINVAL),
    ],
    ids=short,
)
def test_bad_dma(peer: Peer, request_: bytes, fds: int, error_no: int) -> None:
    assert peer.ask(request_, eventfds(fds)) == (error_no, b"")
    assert peer.device.calls == []


# -------------------------------------------------------------------------------------------------- accesses


def test_accesses(peer: Peer) -> None:
    assert peer.ask(msg(REGION_READ, access(0, 0x3FFC, 4))) == (0, access(0, 0x3FFC, 4) + b"\xfc\xfd\xfe\xff")
    assert peer.ask(msg(REGION_WRITE, access(7, 4, 2) + b"\6\4")) == (0, access(7, 4, 2))
    assert peer.device.calls == [("read", 0, 0x3FFC, 4), ("write", 7, 4, b"\6\4", False)]


@pytest.mark.parametrize(
    "request_",
    [
        msg(REGION_READ, access(0, 0x3FFD, 4)),
        msg(REGION_READ, access(0, 0x4000, 1)),
        msg(REGION_READ, access(0, (1 << 64) - 1, 2)),
        msg(REGION_READ, access(0, 0, 0)),
        msg(REGION_READ, access(0, 0, 65537)),
        msg(REGION_READ, access(9, 0, 4)),
        msg(REGION_READ, access(3, 0, 4)),
        msg(REGION_READ, access(0, 0, 4) + b"x"),
        msg(REGION_READ, bytes(15)),
        msg(REGION_WRITE, access(1, 0, 4) + bytes(4)),  # read-only
        msg(REGION_WRITE, access(0, 0, 4) + bytes(3)),
        msg(REGION_WRITE, access(0, 0, 4) + bytes(5)),
        msg(REGION_WRITE, access(0, 0, 0)),
        msg(REGION_WRITE, access(0, 0x3FFD, 4) + bytes(4)),
        msg(RESET, b"x"),
    ],
    ids=short,
)
def test_bad_accesses(peer: Peer, request_: bytes) -> None:
    assert peer.ask(request_) == EINVAL
    assert peer.device.calls == []


@pytest.mark.parametrize(
    ("failure", "error_no"),
    [(VfioUserError(errno.EEXIST), errno.EEXIST), (OSError(errno.EMFILE, "x"), errno.EMFILE), (OSError(), errno.EIO)],
)
def test_failures_of_the_device_become_replies(peer: Peer, failure: Exception, error_no: int) -> None:
    peer.device.failure = failure
    assert peer.ask(msg(REGION_READ, access(0, 0, 4))) == (error_no, b"")
    assert peer.ask(dma_map(0, 4096), eventfds(1)) == (error_no, b"")


def test_every_descriptor_is_closed(peer: Peer) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for message in (msg(RESET), dma_map(0, 4096), irqs(0x24, 2, 0, 1), irqs(0x24, 9, 0, 1), msg(99), b"x"):
        peer.handle(message, eventfds(1))
        peer.handle(message, eventfds(3))
    assert len(os.listdir("/proc/self/fd")) == before


SMALL = st.sampled_from([0, 1, 2, 3, 4, 8, 16, 20, 24, 32, 0x1000, 0x3FFF, 0x4000, 0xFFFFFFFF])
STRUCTURED = st.builds(
    lambda cmd, words, tail, flags: msg(cmd, b"".join(struct.pack("<I", w) for w in words) + tail, flags),
    st.integers(0, 20),
    st.lists(SMALL | st.integers(0, 0xFFFFFFFF), max_size=9),
    st.binary(max_size=40),
    st.sampled_from([0, 0, 0, 1, 0x10, 0x20, 0x30]),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(STRUCTURED | st.binary(max_size=80), st.integers(0, 2)), max_size=6))
def test_any_bytes_get_a_reply_or_nothing_that_was_not_asked_for(messages: list[tuple[bytes, int]]) -> None:
    peer = Peer()
    for message, fds in messages:
        header = message[:16].ljust(16, b"\0")
        flags = struct.unpack_from("<I", header, 8)[0]
        reply = peer.handle(message, eventfds(fds))
        if flags & NO_REPLY:
            assert reply == b""
            continue
        assert reply[:4] == header[:4]
        size, reply_flags, error_no = struct.unpack_from("<III", reply, 4)
        assert size == len(reply) and reply_flags in (REPLY, REPLY | ERROR)
        assert (reply_flags == REPLY | ERROR) == (error_no != 0)
    for call in peer.device.calls:  # whatever got through is inside its region
        if call[0] in ("read", "write"):
            count = call[3] if call[0] == "read" else len(call[3])
            assert count > 0 and call[2] + count <= peer.device.regions[call[1]].size
        elif call[0] in ("map", "unmap"):
            assert call[2] > 0 and call[1] + call[2] <= 1 << 64
        elif call[0] == "irqs":
            assert call[2] + call[3] <= peer.device.irqs[call[1]].count


# --------------------------------------------------------------------------- what the keeper knows: framing


def feed(reader: MessageReader, data: bytes, pieces: Sequence[int] = ()) -> list[bytes]:
    """Feed as a socket would: never more than the reader wants, cut by ``pieces`` as well."""
    cuts, found = list(pieces), []
    while data:
        count = min(reader.want, cuts.pop(0) if cuts else len(data), len(data))
        message = reader.feed(data[:count], [])
        data = data[count:]
        if message is not None:
            found.append(message.raw)
    return found


@given(st.lists(st.binary(max_size=200), max_size=6), st.lists(st.integers(1, 50), max_size=30))
def test_messages_come_out_as_they_went_in(payloads: list[bytes], pieces: list[int]) -> None:
    messages = [msg(i % 20, payload, msg_id=i) for i, payload in enumerate(payloads)]
    reader = MessageReader()
    assert feed(reader, b"".join(messages), pieces) == messages
    assert reader.want == 16 and not reader.partial


def test_an_oversize_message_comes_out_as_its_header() -> None:
    size = wire.MESSAGE_BYTES_MAX + 1
    too_large, largest = msg(RESET, bytes(size - 16)), msg(RESET, bytes(size - 17))
    reader = MessageReader()
    assert feed(reader, too_large + largest) == [too_large[:16], largest]
    assert keeping.refusal(Message(too_large[:16], [])) == errno.EMSGSIZE
    assert keeping.refusal(Message(largest, [])) == 0
    reader.feed(struct.pack("<HHIII", 1, 1, 0xFFFFFFFF, 0, 0), [])
    assert reader.want <= 1 << 16 and reader.partial
    assert keeping.error_reply(too_large[:16], 90) == struct.pack("<HHIII", 7, RESET, 16, 0x21, 90)
    assert keeping.error_reply(msg(RESET, flags=NO_REPLY), 90) == b""


@pytest.mark.parametrize("size", [0, 1, 15])
def test_a_size_below_the_header_ends_the_stream(size: int) -> None:
    with pytest.raises(StreamError):
        MessageReader().feed(struct.pack("<HHIII", 1, 1, size, 0, 0), [])


def test_descriptors_belong_to_the_piece_with_the_last_byte() -> None:
    reader, a, b = MessageReader(), msg(1, b"x"), msg(2)
    assert reader.feed(a[:3], [100]) is None
    assert reader.feed(a[3:16], []) is None
    assert reader.feed(a[16:], [101]) == Message(a, [100, 101])
    assert reader.feed(b, [102]) == Message(b, [102])
    reader.feed(a[:1], list(range(1000, 1250)))
    with pytest.raises(StreamError):
        reader.feed(a[1:2], [1250])


# ---------------------------------------------------------------------------- what the keeper knows: tables


class NaiveTables:
    """The tables as sets of addresses and vectors."""

    def __init__(self) -> None:
        self.regions: dict[int, tuple[int, int]] = {}
        self.vectors: dict[tuple[int, int], int] = {}


PAGES = st.integers(0, 7)
STEPS = st.lists(
    st.tuples(st.just("map"), PAGES, st.integers(1, 3), st.sampled_from([None, 0, 1]))
    | st.tuples(st.just("unmap"), PAGES, st.integers(1, 8), st.none())
    | st.tuples(st.just("connect"), st.integers(0, 5), st.integers(1, 4), st.integers(1, 2))
    | st.tuples(st.just("disconnect"), st.integers(0, 5), st.integers(1, 4), st.integers(1, 2))
    | st.tuples(st.just("disable"), st.none(), st.none(), st.integers(1, 2)),
    max_size=25,
)


@settings(deadline=None)
@given(STEPS)
def test_tables_against_a_naive_model(steps: list[tuple[str, Any, Any, Any]]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    files = [os.memfd_create(name) for name in "ab"]
    inodes = [os.fstat(fd).st_ino for fd in files]
    tables, model, marks = Tables(), NaiveTables(), 0
    for what, start, count, which in steps:
        if what == "map":
            fds = [] if which is None else [os.dup(files[which])]
            tables.commit(Message(dma_map(start << 12, count << 12, offset=start), fds))
            model.regions[start << 12] = (count << 12, 0 if which is None else inodes[which])
        elif what == "unmap":
            tables.commit(Message(dma_unmap(start << 12, count << 12), []))
            end = start + count << 12
            for iova, (size, _) in list(model.regions.items()):
                if start << 12 <= iova and iova + size <= end:
                    del model.regions[iova]
        elif what == "connect":
            new = [os.eventfd(marks + i + 1) for i in range(count)]
            tables.commit(Message(irqs(0x24, which, start, count), new))
            for i in range(count):
                model.vectors[which, start + i] = marks + i + 1
            marks += count
        else:
            message = irqs(0x24, which, start, count) if what == "disconnect" else irqs(0x21, which, 0, 0)
            tables.commit(Message(message, []))
            for index, vector in list(model.vectors):
                if index == which and (what == "disable" or start <= vector < start + count):
                    del model.vectors[index, vector]
    regions = {r.iova: (r.size, os.fstat(r.fd).st_ino if r.fd is not None else 0) for r in tables.regions}
    assert regions == model.regions
    assert all(region.offset == region.iova >> 12 and region.flags == 3 for region in tables.regions)
    vectors = {}
    for index, first, fds in tables.irq_ranges():
        assert (index, first - 1) not in model.vectors, "runs are as long as they can be"
        for i, fd in enumerate(fds):
            vectors[index, first + i] = os.eventfd_read(fd)
    assert vectors == model.vectors
    used = {inode for _, inode in model.regions.values() if inode}
    assert len(os.listdir("/proc/self/fd")) == before + 2 + len(used) + len(model.vectors)
    tables.close()
    for fd in files:
        os.close(fd)
    assert len(os.listdir("/proc/self/fd")) == before


def test_tables_have_a_limit() -> None:
    tables = Tables()
    for i in range(keeping.FILES_MAX):
        message = Message(dma_map(i << 12, 4096), [os.memfd_create("f")])
        assert not tables.full(message)
        tables.commit(message)
    one_more = Message(dma_map(1 << 40, 4096), [os.memfd_create("f")])
    assert tables.full(one_more)
    assert not tables.full(Message(dma_map(1 << 40, 4096), [tables.regions[0].fd or -1]))
    assert not tables.full(Message(msg(RESET), []))
    tables.close()
    os.close(one_more.fds[0])


def test_long_runs_of_vectors_fit_packets() -> None:
    tables = Tables()
    for start in range(0, 300, 100):
        tables.commit(Message(irqs(0x24, 2, start, 100), eventfds(100)))
    assert [(i, first, len(fds)) for i, first, fds in tables.irq_ranges()] == [(2, 0, 250), (2, 250, 50)]
    tables.close()


@settings(deadline=None)
@given(STRUCTURED)
def test_a_dead_device_has_an_answer_to_everything(message: bytes) -> None:
    reply = keeping.dead_reply(message)
    flags = struct.unpack_from("<I", message, 8)[0]
    assert (reply == b"") == bool(flags & (NO_REPLY | REPLY)), "posted, or itself a reply"
    if reply:
        assert reply[:4] == message[:4] and struct.unpack_from("<I", reply, 4)[0] == len(reply)
        assert len(reply) <= wire.MESSAGE_BYTES_MAX


def test_a_dead_device_reads_all_ones() -> None:
    assert keeping.dead_reply(msg(REGION_READ, access(0, 0x1C, 4)))[16:] == access(0, 0x1C, 4) + b"\xff" * 4
    assert keeping.dead_reply(msg(REGION_WRITE, access(0, 0, 4) + b"abcd"))[16:] == access(0, 0, 4)
    assert keeping.dead_reply(dma_unmap(0, 4096))[16:] == dma_unmap(0, 4096)[16:]
    for message in (dma_map(0, 4096), irqs(0x21, 2, 0, 0), msg(RESET)):
        assert struct.unpack("<HHIII", keeping.dead_reply(message))[3:] == (REPLY, 0)
    for message in (version(), region_info(32, 0), msg(99)):
        assert struct.unpack("<HHIII", keeping.dead_reply(message))[3:] == (REPLY | ERROR, errno.EIO)
    huge = keeping.dead_reply(msg(REGION_READ, access(0, 0, 1 << 31)))
    assert struct.unpack("<HHIII", huge)[3:] == (REPLY | ERROR, errno.EINVAL)


def test_a_window_needs_its_flag_and_descriptor() -> None:
    with pytest.raises(AssertionError):
        RegionInfo(0, 4096, 3, (Window(0, 4096),), 1)
    assert protocol.ADDRESS_END == 2**64
