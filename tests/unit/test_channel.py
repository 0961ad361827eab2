"""The channel between keeper and worker, and the two memfds beside it."""

from __future__ import annotations

import os
import signal
import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpu.channel import (
    FDS_MAX,
    PACKET_BYTES_MAX,
    Channel,
    ConfigStore,
    Health,
    QueuedChannel,
    close_fds,
    pair,
)


def queued_pair() -> tuple[QueuedChannel, Channel]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return QueuedChannel(left), Channel(right)


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_packet_carries_fields_bytes_and_descriptors() -> None:
    left, right = pair()
    reading, writing = os.pipe()
    left.send("stash", raw=b"\0\1raw", fds=[writing], key="k", number=1 << 63)
    packet = right.recv()
    assert packet is not None
    assert (packet.op, packet.fields, packet.raw) == ("stash", {"key": "k", "number": 1 << 63}, b"\0\1raw")
    assert [os.get_inheritable(fd) for fd in packet.fds] == [False]
    os.write(packet.fds[0], b"x")
    assert os.read(reading, 1) == b"x"
    packet.close()
    close_fds([reading, writing])


def test_the_form_on_the_wire() -> None:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    Channel(left).send("take", client=7, raw=b"tail")
    assert right.recv(4096) == struct.pack("<I", 24) + b'{"op":"take","client":7}' + b"tail"


def test_the_largest_packet_with_the_most_descriptors() -> None:
    left, right = pair()
    fd = os.open("/dev/null", os.O_RDONLY)
    room = PACKET_BYTES_MAX - 4 - len('{"op":"x"}')
    left.send("x", raw=bytes(room), fds=[fd] * FDS_MAX)
    packet = right.recv()
    assert packet is not None and len(packet.raw) == room and len(packet.fds) == FDS_MAX
    packet.close()
    with pytest.raises(ValueError, match="exceeds"):
        left.send("x", raw=bytes(room + 1))
    with pytest.raises(ValueError, match="descriptors exceeds"):
        left.send("x", fds=[fd] * (FDS_MAX + 1))
    os.close(fd)


def test_what_a_dead_peer_had_sent_comes_before_its_end() -> None:
    # The peer leaves a packet of ours unread: Linux then reports ECONNRESET ahead of what it sent.
    left, right = pair()
    left.send("unread")
    right.send("reply", seq=1)
    right.send("reply", seq=2)
    right.close()
    assert [packet.fields["seq"] for packet in iter(left.recv, None) if packet] == [1, 2]


@pytest.mark.parametrize(
    "data",
    [
        b"\1",
        struct.pack("<I", 3) + b"{}",
        struct.pack("<I", 2) + b"[]",
        struct.pack("<I", 2) + b"{}",
        struct.pack("<I", 8) + b'{"op":1}',
        struct.pack("<I", 1) + b"x",
        bytes(PACKET_BYTES_MAX + 1),
    ],
)
def test_what_is_no_packet_is_refused_and_its_descriptors_closed(data: bytes) -> None:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    before = open_fds()
    channel = Channel(right)
    socket.send_fds(left, [data], [0])
    with pytest.raises(ValueError):
        channel.recv()
    assert open_fds() == before


def test_an_empty_channel_does_not_block_when_told() -> None:
    left, right = pair()
    with pytest.raises(BlockingIOError):
        left.recv(blocking=False)
    right.close()
    assert left.recv(blocking=False) is None


def test_a_queued_channel_never_waits_and_keeps_order_and_descriptors() -> None:
    left, right = queued_pair()
    before = open_fds()

    def send(number: int) -> None:
        fd = os.memfd_create("n")
        os.write(fd, str(number).encode())
        left.send("x", raw=bytes(8192), fds=[fd], number=number)
        os.close(fd)

    def receive(number: int) -> None:
        packet = right.recv()
        assert packet is not None and packet.fields["number"] == number
        assert os.pread(packet.fds[0], 8, 0) == str(number).encode()
        packet.close()

    for number in range(200):
        send(number)
    assert left.backlog > 0
    receive(0)  # now there is room, and yet the next one has to wait its turn
    send(200)
    for number in range(1, 201):
        receive(number)
        left.flush()
    assert left.backlog == 0
    assert open_fds() == before


def test_a_queued_channel_closes_what_it_never_sent() -> None:
    before = open_fds()
    left, right = queued_pair()
    for _ in range(200):
        left.send("x", raw=bytes(8192), fds=[0])
    left.close()
    right.close()
    assert open_fds() == before


@given(st.lists(st.binary(max_size=3000), max_size=8))
def test_a_store_has_the_document_committed_last(documents: list[bytes]) -> None:
    fd = ConfigStore.create()
    store, other = ConfigStore(fd), ConfigStore(fd)
    os.close(fd)
    assert store.load() == b""
    for document in documents:
        store.commit(document)
        assert store.load() == other.load() == document
    store.close()
    other.close()


def test_a_commit_leaves_the_document_before_it_alone() -> None:
    fd = ConfigStore.create()
    store = ConfigStore(fd)
    store.commit(b"the old document")
    store.commit(b"the new document")
    whole = os.pread(fd, ConfigStore.size(), 0)
    assert b"the old document" in whole and b"the new document" in whole
    os.close(fd)


def test_a_store_refuses_what_is_too_large_and_keeps_what_it_has() -> None:
    fd = ConfigStore.create()
    store = ConfigStore(fd)
    largest = bytes(ConfigStore.HALF_BYTES - 8)
    store.commit(largest)
    with pytest.raises(ValueError, match="exceeds"):
        store.commit(largest + b"x")
    assert store.load() == largest


def test_a_store_survives_a_kill_in_the_middle_of_commits() -> None:
    fd = ConfigStore.create()
    store = ConfigStore(fd)
    store.commit(b"0" * 1000)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        number = 0
        while True:
            number += 1
            digit = str(number % 10).encode()
            store.commit(digit * (100000 + number % 977))
            if number == 100:
                os.write(writing, b"x")
    os.read(reading, 1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    document = ConfigStore(fd).load()
    assert len(document) >= 100000 and document == document[:1] * len(document)
    close_fds([reading, writing, fd])


def test_heartbeats() -> None:
    fd = Health.create()
    mine, theirs = Health(fd), Health(fd)
    assert theirs.snapshot() == (0,)
    mine.beat()
    mine.words[Health.POLLERS] = 2
    mine.beat(Health.FIRST_POLLER + 1)
    assert theirs.snapshot() == (1, 0, 1)
    mine.words[Health.POLLERS] = 1 << 60  # a worker's fault is no fault of the keeper
    assert len(theirs.snapshot()) == Health.POLLERS
    os.close(fd)
