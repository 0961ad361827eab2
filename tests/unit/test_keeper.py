"""The keeper over a worker without NVMe, with real processes and sockets: every reply exactly once."""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import os
import resource
import signal
import socket
import stat
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dpu.channel import Health, QueuedChannel
from dpu.vfio_user import wire
from dpu.vfio_user.wire import Command, HeaderFlag
from dpu.worker_process import ForkServer
from tests.support import fake_worker
from tests.support.fake_worker import BAR_BYTES, DOORBELLS, FATAL_OFFSET
from tests.support.keeper_lab import DEADLINE_S, KeeperLab, VfioClient, in_recvmsg, wait_exit

Start = Callable[..., KeeperLab]

# Where the fake worker can die while it serves a message, and how often the device then carries it out, each
# time with what the worker is told about an earlier try: True as soon as one before it may have had it.
EXECUTIONS = {
    "before_take": [False],
    "after_take": [True],
    "received": [True],
    "executed": [False, True],
    "replied": [False],
}
POINTS = tuple(EXECUTIONS)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    labs: list[KeeperLab] = []

    def make(**options: Any) -> KeeperLab:
        lab = KeeperLab(tmp_path, **options)
        labs.append(lab)
        return lab

    yield make
    for lab in labs:
        lab.close()


def memfd(name: str = "ram", size: int = 65536) -> int:
    fd = os.memfd_create(name)
    os.ftruncate(fd, size)
    return fd


def test_everything_is_handed_to_the_next_worker(start: Start) -> None:
    lab = start().ready()
    client = VfioClient(lab.listen("a"))
    ram, vectors = memfd(), [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(4)]
    client.write(0x100, b"kept")
    client.write(DOORBELLS, b"\7\0\0\0", posted=True)
    assert client.dma_map(0x10000, 8192, ram, offset=4096) == 0
    assert client.dma_map(0x40000, 4096) == 0
    assert client.set_irqs(0, vectors[:2]) == 0
    assert client.set_irqs(5, vectors[2:]) == 0
    lab.rpc("stash", key="x", text="one")
    lab.rpc("stash", key="x", text="two")
    lab.rpc("stash", key="y", text="gone")
    lab.rpc("unstash", key="y")
    lab.rpc("commit", text='{"configured": true}')
    before = lab.rpc("state")

    died = lab.kill_worker()
    match = lab.wait_log(rf"worker {died} died \(SIGKILL\), (\d+) serves after (\d+\.\d) ms$")

    after = lab.rpc("state")
    assert (before["generation"], after["generation"]) == (1, 2)
    assert after["pid"] == int(match[1]) != died
    assert {k: v.rstrip("\0") for k, v in after["stash"].items() if k != "bar/1"} == {"x": "two"}
    assert after["config"] == '{"configured": true}'
    assert after["listeners"] == {"a": str(lab.directory / "a")}
    told = after["clients"]["1"]
    assert told["dma"] == [
        {"iova": 0x10000, "size": 8192, "flags": 3, "offset": 4096, "inode": os.fstat(ram).st_ino},
        {"iova": 0x40000, "size": 4096, "flags": 3, "offset": 0, "inode": None},
    ]
    assert told["vectors"] == [[2, 0], [2, 1], [2, 5], [2, 6]]
    assert told["capabilities"] == {"max_msg_fds": 16}
    assert client.read(0x100) == b"kept"
    assert client.read(DOORBELLS) == b"\7\0\0\0"
    lab.rpc("fire", client=1, index=2, vector=6)
    assert os.eventfd_read(vectors[3]) == 1
    assert VfioClient(str(lab.directory / "a")).read(0) == bytes(4)


@pytest.mark.parametrize("point", POINTS)
def test_a_message_is_answered_once_wherever_the_worker_dies(start: Start, point: str) -> None:
    # Each exchange runs under a lab of its own generation 1 that dies at its second message (VERSION is
    # the first), so the write below meets the point.
    lab = start(env={"DPU_EMU_KILL_AT": f"{point}:2"}).ready()
    client = VfioClient(lab.listen("a"))
    client.write(0x10, b"data")
    assert client.silent()
    assert client.read(0x10) == b"data"
    lab.wait_log(r"died \(SIGKILL\), \d+ serves after")
    executions = [event["replayed"] for event in lab.events(event="write")]
    assert executions == EXECUTIONS[point]
    assert client.read(0x10) == b"data"
    assert client.silent()


@pytest.mark.parametrize("point", POINTS)
def test_a_posted_message_is_not_lost(start: Start, point: str) -> None:
    lab = start(env={"DPU_EMU_KILL_AT": f"{point}:2"}).ready()
    client = VfioClient(lab.listen("a"))
    client.write(0x10, b"post", posted=True)
    assert client.read(0x10) == b"post"
    assert client.silent()


@pytest.mark.parametrize("point", POINTS)
def test_descriptors_of_a_replayed_message_come_again(start: Start, point: str) -> None:
    lab = start(env={"DPU_EMU_KILL_AT": f"{point}:2"}).ready()
    client = VfioClient(lab.listen("a"))
    ram = memfd()
    assert client.dma_map(0x1000, 4096, ram) == 0
    os.eventfd_write(vector := os.eventfd(0), 0)
    assert client.set_irqs(3, [vector]) == 0
    told = lab.rpc("state")["clients"]["1"]
    assert [region["inode"] for region in told["dma"]] == [os.fstat(ram).st_ino]
    assert told["vectors"] == [[2, 3]]
    lab.rpc("fire", client=1, index=2, vector=3)
    assert os.eventfd_read(vector) == 1


def test_a_doorbell_stored_and_not_consumed_is_stored_again(start: Start) -> None:
    lab = start(env={"DPU_EMU_KILL_AT": "doorbell_stored:2"}).ready()
    client = VfioClient(lab.listen("a"))
    client.write(DOORBELLS, b"\1\0\0\0", posted=True)
    client.write(DOORBELLS + 8, b"\2\0\0\0", posted=True)
    client.write(DOORBELLS, b"\3\0\0\0", posted=True)
    assert client.read(DOORBELLS, 12) == b"\3\0\0\0" + bytes(4) + b"\2\0\0\0"
    lab.wait_log("serves after")


@pytest.mark.parametrize("point", ["adopting", "adopting:2", "adopted"])
def test_a_worker_that_dies_while_it_takes_over(start: Start, point: str) -> None:
    # Generation 1 takes nothing over that counts: the second is the one to die.
    env = {"DPU_EMU_KILL_AT": point, "DPU_EMU_KILL_GENERATIONS": "2"}
    lab = start(env=env).ready()
    client = VfioClient(lab.listen("a"))
    client.write(0, b"1234")
    lab.kill_worker()
    assert client.read(0) == b"1234"
    assert lab.rpc("state")["generation"] >= 3


def test_generation_two_does_not_get_the_kill_point(start: Start) -> None:
    lab = start(env={"DPU_EMU_KILL_AT": "received:1"}).ready()
    VfioClient(lab.listen("a")).write(0, b"1234")
    state = lab.rpc("state")
    assert state["generation"] == 2
    assert state["kill_point"] == ""


def test_tables_follow_replies_without_error_only(start: Start) -> None:
    lab = start(standby=False).ready()
    client = VfioClient(lab.listen("a"))
    ram, vector = memfd(), os.eventfd(0)
    open_before = lab.fds()
    assert client.dma_map(0x1001, 4096, ram) == errno.EINVAL  # the device refuses it
    assert client.dma_map(0x1000, 0, ram) == errno.EINVAL  # the session refuses it
    assert client.set_irqs(299, [vector, vector]) == errno.EINVAL
    assert client.dma_unmap(0x1000, 0) == errno.EINVAL
    assert lab.fds() == open_before
    for iova in (0x1000, 0x2000, 0x3000):
        assert client.dma_map(iova, 4096, ram) == 0
    assert lab.fds() == open_before + 1  # one descriptor per file
    assert client.set_irqs(0, [vector, vector, vector]) == 0
    assert client.set_irqs(1, [], count=1) == 0
    assert client.dma_unmap(0x2000, 4096) == 0
    assert lab.fds() == open_before + 3
    lab.kill_worker()
    told = lab.rpc("state")["clients"]["1"]
    assert [region["iova"] for region in told["dma"]] == [0x1000, 0x3000]
    assert told["vectors"] == [[2, 0], [2, 2]]
    assert client.dma_unmap(0, 1 << 63) == 0
    assert client.set_irqs(0, [], count=0, flags=0x21) == 0
    assert lab.fds() == open_before


def test_descriptors_stay_with_their_message(start: Start) -> None:
    lab = start().ready()
    client = VfioClient(lab.listen("a"))
    rams = [memfd(f"ram{i}") for i in range(3)]
    maps = [client.message(Command.DMA_MAP, bytes(wire.DmaMap(32, 3, 0, 4096 * (i + 1), 4096))) for i in (0, 1)]
    for message, ram in zip(maps, rams):  # both are queued before either is answered
        socket.send_fds(client.sock, [message], [ram])
    first = client.next_id - 2
    assert [client.reply_to(first)[0], client.reply_to(first + 1)[0]] == [0, 0]
    # in pieces, the descriptor with the last one
    message = client.message(Command.DMA_MAP, bytes(wire.DmaMap(32, 3, 0, 4096 * 3, 4096)))
    client.sock.sendall(message[:7])
    client.sock.sendall(message[7:30])
    socket.send_fds(client.sock, [message[30:]], [rams[2]])
    assert client.reply_to(client.next_id - 1)[0] == 0
    assert [e["inode"] for e in lab.events(event="dma_map")] == [os.fstat(ram).st_ino for ram in rams]


def test_a_reply_can_carry_a_descriptor(start: Start) -> None:
    lab = start().ready()
    client = VfioClient(lab.listen("a"))
    client.write(0, b"seen")
    client.send(Command.DEVICE_GET_REGION_INFO, bytes(wire.RegionInfo(64, 0, 2)))
    _, fds, _, _ = socket.recv_fds(client.sock, 4096, 4)
    assert [os.pread(fd, 4, 0) for fd in fds] == [b"seen"]


def test_a_reply_to_another_message_is_not_sent(start: Start) -> None:
    lab = start(env={"FAKE_STALE_REPLIES": "1"}).ready()
    client = VfioClient(lab.listen("a"))
    client.write(0, b"true")
    assert client.read(0) == b"true"
    assert client.silent()


def test_half_a_message_survives_the_worker(start: Start) -> None:
    lab = start().ready()
    path = lab.listen("a")
    slow, other = VfioClient(path), VfioClient(path)
    payload = bytes(wire.RegionAccess(0x20, 0, 4)) + b"slow"
    message = slow.message(Command.REGION_WRITE, payload)
    slow.sock.sendall(message[:20])
    other.write(0, b"fast")  # nobody waits for a client that stalls
    lab.kill_worker()
    assert other.read(0) == b"fast"
    slow.sock.sendall(message[20:33])
    lab.kill_worker()
    assert other.read(0) == b"fast"
    slow.sock.sendall(message[33:])
    assert slow.reply_to(slow.next_id - 1)[0] == 0
    assert slow.read(0x20) == b"slow"


def test_the_inside_of_a_message_is_not_taken_for_a_doorbell(start: Start) -> None:
    lab = start().ready()
    client = VfioClient(lab.listen("a"))
    doorbell = bytes(wire.RegionAccess(DOORBELLS, 0, 4)) + b"\7\0\0\0"
    data = wire.message(99, Command.REGION_WRITE, doorbell, HeaderFlag.NO_REPLY)
    message = client.message(Command.REGION_WRITE, bytes(wire.RegionAccess(0, 0, len(data))) + data)
    client.sock.sendall(message[: -len(data)])
    lab.until(lambda: not unread(client.sock))
    lab.kill_worker()
    lab.rpc("state")
    lab.process.send_signal(signal.SIGSTOP)  # the worker alone could see it now
    client.sock.sendall(data)
    for _ in range(10):
        lab.rpc("state")
    lab.process.send_signal(signal.SIGCONT)
    assert client.reply_to(client.next_id - 1)[0] == 0
    assert client.read(0, len(data)) == data
    assert client.read(DOORBELLS) == bytes(4)


def unread(sock: socket.socket) -> int:
    """Bytes that the peer has not read (SIOCOUTQ counts what is queued)."""
    return int.from_bytes(fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)), sys.byteorder)


def test_what_a_worker_sent_before_it_died_counts(start: Start) -> None:
    lab = start(constants={"_PACKETS_PER_TURN": 1}).ready()
    worker = os.pidfd_open(lab.rpc("state")["pid"])
    lab.process.send_signal(signal.SIGSTOP)  # so that the death and what was sent are seen together
    with socket.socket(socket.AF_UNIX) as rpc:
        rpc.connect(lab.rpc_path)
        rpc.sendall(b'{"op": "burst", "count": 8}\n')
        wait_exit(worker)
    lab.process.send_signal(signal.SIGCONT)
    assert len(lab.rpc("state")["stash"]) == 8


def test_an_oversize_message_is_discarded_and_refused(start: Start) -> None:
    lab = start().ready()
    client = VfioClient(lab.listen("a"))
    client.write(0, b"mine")
    for flags, size in ((0, 8 << 20), (HeaderFlag.NO_REPLY, 1 << 20)):
        header = wire.Header(77, Command.REGION_WRITE, 16 + size, flags, 0)
        client.sock.sendall(bytes(header))
        piece = bytes(1 << 16)
        for _ in range(size >> 16):
            client.sock.sendall(piece)
        if not flags:
            assert client.reply_to(77) == (errno.EMSGSIZE, b"")
    assert client.read(0) == b"mine"
    assert lab.events(event="write") == lab.events(event="write", offset=0)
    rss_kib = int(next(line for line in status(lab) if line.startswith("VmHWM")).split()[1])
    assert rss_kib < 64 << 10


def status(lab: KeeperLab) -> list[str]:
    return Path(f"/proc/{lab.process.pid}/status").read_text().splitlines()


def test_the_largest_message_is_served(start: Start) -> None:
    lab = start().ready()
    client = VfioClient(lab.listen("a"))
    payload = bytes(wire.MESSAGE_BYTES_MAX - wire.HEADER_BYTES)
    assert client.call(Command.REGION_WRITE, payload) == (errno.EINVAL, b"")
    assert client.read(0) == bytes(4)


@pytest.mark.parametrize("size", [0, 15])
def test_a_size_below_the_header_ends_the_connection(start: Start, size: int) -> None:
    lab = start().ready()
    path = lab.listen("a")
    client, other = VfioClient(path), VfioClient(path)
    client.sock.sendall(bytes(wire.Header(1, Command.REGION_READ, size, 0, 0)))
    assert client.sock.recv(1) == b""
    lab.wait_log(rf"client 1 of a: connection over: message size {size}")
    assert other.read(0) == bytes(4)


def test_the_end_of_a_connection_needs_no_worker(start: Start) -> None:
    lab = start().ready()
    client = VfioClient(lab.listen("a"))
    header = bytes(wire.Header(1, Command.REGION_READ, 3, 0, 0))
    client.sock.sendall(header[:7])
    lab.until(lambda: not unread(client.sock))
    os.kill(lab.rpc("state")["pid"], signal.SIGSTOP)  # it has a dup of the socket
    client.sock.sendall(header[7:])
    assert client.sock.recv(1) == b""


def test_a_client_that_takes_no_replies_holds_up_nobody(start: Start) -> None:
    lab = start().ready()
    path = lab.listen("a")
    lazy, other = VfioClient(path), VfioClient(path)
    payload = bytes(wire.RegionAccess(0, 0, BAR_BYTES))
    sent = []
    lazy.sock.setblocking(False)
    try:
        while len(sent) < 100000:
            sent.append(lazy.send(Command.REGION_READ, payload))
    except BlockingIOError:
        lazy.next_id -= 1
    lazy.sock.settimeout(DEADLINE_S)
    other.write(0, b"fine")
    for _ in range(2):
        for _ in range(60):  # clients take turns: meanwhile replies to the lazy one fill its socket
            assert other.read(0) == b"fine"
        lab.kill_worker()
    # The kernel keeps some 4 replies of 64 KiB, one in part; no more requests are read than that, and queued nowhere.
    assert len(lab.events(event="read all")) < 40 < len(sent)
    for msg_id in sent:
        error_no, data = lazy.reply_to(msg_id)
        assert (error_no, len(data)) == (0, BAR_BYTES + 16)
    assert lazy.silent()


def test_a_client_that_leaves_leaves_nothing_behind(start: Start) -> None:
    lab = start(standby=False).ready()
    path = lab.listen("a")
    before = lab.fds()
    for round_ in range(3):
        client = VfioClient(path)
        assert client.dma_map(0x1000, 4096, memfd()) == 0
        assert client.set_irqs(0, [os.eventfd(0)] * 3) == 0
        client.sock.sendall(client.message(Command.REGION_READ)[: 5 * round_])
        client.close()
        lab.wait_log(rf"client {round_ + 1} of a: connection over")
        lab.until(lambda: len(lab.events(event="forgot")) > round_)  # noqa: B023 (called at once)
    lab.until(lambda: lab.fds() == before)
    assert lab.rpc("state")["clients"] == {}


@pytest.mark.parametrize("point", ["before_take:2", "gone"])
def test_a_client_that_left_is_torn_down_by_the_next_worker(start: Start, point: str) -> None:
    lab = start(env={"DPU_EMU_KILL_AT": point}).ready()
    client = VfioClient(lab.listen("a"))
    client.close()  # the worker dies of the end of file that it sees, or of the keeper's word for it
    lab.wait_log("serves after")
    lab.until(lambda: bool(lab.events(event="forgot", client=1)))


def test_a_worker_can_drop_a_client(start: Start) -> None:
    lab = start().ready()
    client = VfioClient(lab.listen("a"))
    client.sock.sendall(client.message(Command.REGION_READ)[:5])
    lab.rpc("drop", client=1)
    assert client.sock.recv(1) == b""
    lab.wait_log("client 1 of a: connection over: a test wants it")


def test_a_client_that_does_not_read_what_it_is_sent_is_dropped(start: Start) -> None:
    """Nobody waits for it to answer, so what the keeper holds for it has a bound; one below that is kept."""
    lab = start(constants={"BACKLOG_BYTES_MAX": 4 << 20}).ready()
    path = lab.listen("a")
    lazy, reader = VfioClient(path), VfioClient(path)
    lab.rpc("send", client=1, size=1 << 16, count=60)
    assert reader.read(0) is not None
    lab.rpc("send", client=1, size=1 << 16, count=60)
    lab.wait_log("client 1 of a: connection over: it does not read what it is sent")
    lab.until(lambda: bool(lab.events(event="forgot", client=1)))
    assert not any("client 1 " in line for line in lab.log[:-1])
    assert reader.read(0) is not None
    lazy.close()


def test_listeners(start: Start, tmp_path: Path) -> None:
    lab = start().ready()
    path = lab.listen("a")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert lab.rpc("listen", key="a", path=path + "2")["error"] == "the listener exists"
    assert "listens there" in lab.rpc("listen", key="b", path=path)["error"]
    (tmp_path / "file").touch()
    assert "no socket" in lab.rpc("listen", key="b", path=str(tmp_path / "file"))["error"]
    assert lab.rpc("listen", key="b", path=str(tmp_path / "no" / "s"))["error"] == "No such file or directory"
    assert lab.rpc("listen", key="b", path=str(tmp_path / ("x" * 108)))["error"] == "AF_UNIX path too long"
    lab.kill_worker()
    assert lab.rpc("unlisten", key="a")["error"] == ""
    assert not os.path.exists(path)
    assert lab.rpc("unlisten", key="a")["error"] == "no such listener"
    lab.listen("a")


@pytest.mark.parametrize(("what", "who"), [("control", "control"), ("poller", "poller 0"), ("all", "control")])
def test_a_hung_worker_is_replaced(start: Start, what: str, who: str) -> None:
    lab = start(watchdog_s=1.0).ready()
    client = VfioClient(lab.listen("a"))
    client.write(0, b"here")
    lab.rpc("hang", what=what)
    lab.wait_log(rf"died \(SIGKILL by watchdog: {who}\), \d+ serves after")
    assert client.read(0) == b"here"


def test_a_stopped_worker_is_replaced(start: Start) -> None:
    lab = start(watchdog_s=1.0).ready()
    client = VfioClient(lab.listen("a"))
    os.kill(lab.rpc("state")["pid"], signal.SIGSTOP)
    assert client.read(0) == bytes(4)
    lab.wait_log(r"died \(SIGKILL by watchdog: control\), \d+ serves after")


def test_a_worker_that_never_says_up_is_replaced(start: Start) -> None:
    lab = start(env={"FAKE_HANG_GENERATION": "2"}, constants={"ADOPTION_S_MAX": 0.5}, watchdog_s=2.0).ready()
    client = VfioClient(lab.listen("a"))
    first = lab.kill_worker()
    assert client.read(0) == bytes(4)
    lab.wait_log(r"worker \d+ died \(SIGKILL by watchdog: adoption\) before it served")
    lab.wait_log(rf"worker {first} died \(SIGKILL\), \d+ serves after")
    assert lab.rpc("state")["generation"] == 3


def test_without_descriptors_left_others_are_served(start: Start) -> None:
    lab = start(standby=False).ready()
    path = lab.listen("a")
    client, victim = VfioClient(path), VfioClient(path)
    limits = resource.prlimit(lab.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(lab.process.pid, resource.RLIMIT_NOFILE, (lab.fds(), limits[1]))
    with socket.socket(socket.AF_UNIX) as refused:
        refused.connect(path)
        assert refused.recv(1) == b""
    lab.wait_log("out of file descriptors")
    victim.send(Command.DMA_MAP, bytes(wire.DmaMap(32, 3, 0, 0, 4096)), fds=[memfd()])
    assert victim.sock.recv(1) == b""
    lab.wait_log("connection over: descriptors were lost")
    assert client.read(0) == bytes(4)
    resource.prlimit(lab.process.pid, resource.RLIMIT_NOFILE, limits)
    assert VfioClient(path).dma_map(0, 4096, memfd()) == 0


def test_a_worker_that_talks_nonsense_is_replaced(start: Start) -> None:
    lab = start().ready()
    client = VfioClient(lab.listen("a"))
    lab.rpc("nonsense")
    assert client.read(0) == bytes(4)
    lab.wait_log(r"sent a bad packet: KeyError")
    lab.wait_log(r"died \(SIGKILL by keeper: bad packet\), \d+ serves after")


def test_the_standby_takes_over_and_is_replaced(start: Start) -> None:
    lab = start().ready()
    path = lab.listen("a")
    for _ in range(2):
        lab.kill_worker()
        served = int(lab.wait_log(r"died .*, (\d+) serves after")[1])
        VfioClient(path).read(0)
        assert served in lab.children()


def test_deaths_in_quick_succession(start: Start) -> None:
    """Each next worker is a fork: one fork server loads the program once, however many die."""
    lab = start(crash_limit=0).ready()
    client = VfioClient(lab.listen("a"))
    lab.kill_worker()
    server = lab.fork_server()
    for number in range(20):
        client.write(0x10, bytes([number]))
        lab.kill_worker()
        assert client.read(0x10, 1) == bytes([number])
    assert lab.fork_server() == server


def test_a_fork_server_that_dies_is_replaced(start: Start) -> None:
    lab = start().ready()
    client = VfioClient(lab.listen("a"))
    served = lab.rpc("state")["pid"]
    os.kill(server := lab.fork_server(), signal.SIGKILL)
    lab.wait_log(rf"fork server {server} died \(SIGKILL\)")
    assert lab.rpc("state")["pid"] == served
    for _ in range(2):
        lab.kill_worker()
        assert client.read(0) == bytes(4)
    assert lab.fork_server() != server


def test_a_request_that_was_not_sent_is_none() -> None:
    """Its failure is counted once: not again when the end of the fork server is seen."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = ForkServer(os.getpid(), QueuedChannel(mine))
    theirs.close()
    fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises(BrokenPipeError):
        server.ask(armed=False)
    assert not server.busy and len(os.listdir("/proc/self/fd")) == fds
    server.close()


def test_a_fork_server_that_cannot_start_again_does_no_harm(start: Start, tmp_path: Path) -> None:
    program = tmp_path / "worker.sh"
    program.write_text(f'mkdir {tmp_path}/once || exit 7\nexec {sys.executable} {fake_worker.__file__} "$@"\n')
    lab = start(command=["/bin/sh", str(program)]).ready()
    client = VfioClient(lab.listen("a"))
    # It, who serves, and the standby, of which it has told.
    lab.until(lambda: len(lab.children()) == 3 and in_recvmsg(lab.fork_server()))
    os.kill(lab.fork_server(), signal.SIGKILL)
    lab.kill_worker()
    for _ in range(3):
        lab.wait_log(r"fork server \d+ died \(exit 7\)")
    assert client.read(0) == bytes(4)
    assert lab.rpc("state")["generation"] == 2


def test_a_crash_loop_ends_in_errors_not_silence(start: Start) -> None:
    lab = start().ready()
    path = lab.listen("a")
    client, idle = VfioClient(path), VfioClient(path)
    client.write(0, b"good")
    assert client.dma_map(0x1000, 4096, memfd()) == 0
    payload = bytes(wire.RegionAccess(FATAL_OFFSET, 0, 4)) + b"kill"
    assert client.call(Command.REGION_WRITE, payload)[0] == 0
    lab.wait_log("crash loop: 5 workers in a row")
    for child in lab.children():
        with contextlib.suppress(ProcessLookupError):
            wait_exit(os.pidfd_open(child))
    assert len(lab.events(event="write", offset=FATAL_OFFSET)) == 5
    for each in (client, idle):
        assert each.read(0, 8) == b"\xff" * 8
        each.write(DOORBELLS, bytes(4), posted=True)
        each.write(0x14, bytes(4))
        assert each.dma_map(0x10000, 4096, memfd()) == 0
        assert each.dma_unmap(0x10000, 4096) == 0
        assert each.set_irqs(0, [os.eventfd(0)]) == 0
        assert each.call(Command.DEVICE_RESET)[0] == 0
        assert each.call(Command.DEVICE_GET_INFO, bytes(16))[0] == errno.EIO
        assert each.silent()
    with socket.socket(socket.AF_UNIX) as rpc, socket.socket(socket.AF_UNIX) as late:
        rpc.connect(lab.rpc_path)
        assert rpc.recv(1) == b""
        late.connect(path)
        assert late.recv(1) == b""
    assert lab.children() == []  # and no more are started
    assert lab.stop() == 0


def test_a_client_that_workers_die_of_is_cut_off(start: Start) -> None:
    """The others go on, and nobody carries out its message again; a later client of its place is served."""
    lab = start(env={"FAKE_SERVING": "1"}).ready()
    path = lab.listen("a")
    client, other = VfioClient(path), VfioClient(path)
    other.write(0, b"good")
    client.send(Command.REGION_WRITE, bytes(wire.RegionAccess(FATAL_OFFSET, 0, 4)) + b"kill")
    lab.wait_log(r"client 1 of a is cut off: 5 workers in a row died")
    assert client.sock.recv(1) == b""
    assert other.read(0, 4) == b"good"
    lab.until(lambda: bool(lab.events(event="forgot", client=1)))
    assert len(lab.events(event="write", offset=FATAL_OFFSET)) == 5
    assert "bar/1" not in lab.rpc("state")["stash"]
    for _ in range(3):  # these are not counted with those
        lab.kill_worker()
        assert other.read(0, 4) == b"good"
    assert VfioClient(path).read(0) == bytes(4)


def test_who_is_suspected_of_a_death() -> None:
    fd = Health.create()
    health = Health(fd)
    os.close(fd)
    assert health.suspects() == []
    health.words[Health.POLLERS] = 2
    health.words[Health.SERVING : Health.SERVING + 4] = memoryview(array.array("Q", [5, 0, 7, 9]))
    assert health.suspects() == [7, 5]
    assert [health.suspects(stuck) for stuck in range(3)] == [[5], [], [7]]
    health.words[Health.FAULT] = 8
    assert health.suspects() == health.suspects(2) == [8]
    health.close()


def test_without_a_crash_limit_it_goes_on(start: Start) -> None:
    lab = start(crash_limit=0).ready()
    path = lab.listen("a")
    for generation in range(1, 8):
        assert lab.rpc("state")["generation"] == generation
        lab.kill_worker()
    assert VfioClient(path).read(0) == bytes(4)


def test_no_worker_ever_comes_up(start: Start) -> None:
    lab = start(env={"FAKE_FAIL": "1"})
    lab.wait_log("dpud: no worker came up in 5 tries")
    assert lab.end() == 1
    assert "no such luck" in lab.log
    assert not os.path.exists(lab.rpc_path)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, None])
def test_a_clean_stop(start: Start, how: int | None) -> None:
    lab = start().ready()
    path = lab.listen("a")
    client = VfioClient(path)
    client.sock.sendall(client.message(Command.REGION_READ)[:5])
    children = [os.pidfd_open(pid) for pid in lab.children()]
    if how is None:
        lab.rpc("stop")
        assert lab.end() == 0
    else:
        assert lab.stop(how) == 0
    for pidfd in children:
        wait_exit(pidfd)
    assert not os.path.exists(lab.rpc_path) and not os.path.exists(path)
    assert client.sock.recv(1) == b""  # an end of file, not ECONNRESET


def test_a_second_daemon_on_the_same_socket_is_refused(start: Start) -> None:
    lab = start().ready()
    second = start()
    line = second.wait_log(r"^dpud: cannot listen at .*rpc.sock: another process listens there \(end the other")
    assert line and second.end() == 1
    assert lab.rpc("state")["generation"] == 1  # and the first one is as it was


def test_after_a_crash_of_the_keeper(start: Start) -> None:
    lab = start().ready()
    path = lab.listen("a")
    children = [os.pidfd_open(pid) for pid in lab.children()]
    lab.rpc("hang", what="all")  # so that it does not see the end of its channel
    lab.process.kill()
    for pidfd in children:
        wait_exit(pidfd)  # workers do not outlive their keeper
    lab.end()
    assert os.path.exists(path) and os.path.exists(lab.rpc_path)
    again = start().ready()
    again.listen("a")
    assert VfioClient(path).read(0) == bytes(4)
    assert again.stop() == 0
    assert not os.path.exists(path) and not os.path.exists(lab.rpc_path)


def test_a_foreign_file_is_not_removed_at_exit(start: Start) -> None:
    lab = start().ready()
    os.unlink(lab.rpc_path)
    Path(lab.rpc_path).write_text("not ours")
    assert lab.stop() == 0
    assert Path(lab.rpc_path).read_text() == "not ours"
