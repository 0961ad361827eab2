"""Guest memory that is not shared: DMA by messages, clients that answer them wrongly or not at all, and kills."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.conformance.test_kill_points import connected, running
from tests.support import front_ends
from tests.support import nvme_driver as nv
from tests.support.daemon import NS_512, NS_FILE, Daemon
from tests.support.front_ends import FrontEnd
from tests.support.load import Load
from tests.support.nvme_driver import PAGE, Nvme
from tests.support.vfio_user_client import DMA_ACCESS, DMA_READ, DMA_WRITE, HEADER, Message

Connect = Callable[..., Nvme]
TIMEOUT_S = 5.0  # dpu.dma.TIMEOUT_S


@pytest.fixture(scope="module")
def front_end() -> FrontEnd:
    return front_ends.UNSHARED


class Answers:
    """Answers the server's requests as told: `twist(message)` gives bytes to send instead, or None for the truth."""

    def __init__(self, nvme: Nvme) -> None:
        self.nvme = nvme
        self.seen: list[tuple[int, int, int]] = []  # (command, iova, bytes)
        self.twist: Callable[[Message], bytes | None] = lambda message: None
        self.truth = nvme.client._serve
        nvme.client._serve = self.serve  # type: ignore[method-assign]

    def serve(self, message: Message) -> None:
        self.seen.append((message.command, *DMA_ACCESS.unpack_from(message.payload)))
        answer = self.twist(message)
        if answer is None:
            self.truth(message)
        else:
            self.nvme.client.send_raw(answer)

    def about(self, buffer: nv.Buffer, answer: Callable[[Message], bytes]) -> None:
        """Twist what concerns a buffer."""

        def twist(message: Message) -> bytes | None:
            iova, _ = DMA_ACCESS.unpack_from(message.payload)
            return answer(message) if buffer.iova <= iova < buffer.iova + len(buffer) else None

        self.twist = twist


def reply(
    message: Message, payload: bytes, *, flags: int = 1, errno: int = 0, message_id: int | None = None
) -> bytes:
    number = message.id if message_id is None else message_id
    return HEADER.pack(number, message.command, HEADER.size + len(payload), flags, errno) + payload


def error(message: Message) -> bytes:
    return reply(message, b"", flags=0x21, errno=14)


def short(message: Message) -> bytes:
    return reply(message, message.payload[:16] + bytes(100))


def other_count(message: Message) -> bytes:
    iova, count = DMA_ACCESS.unpack_from(message.payload)
    return reply(message, DMA_ACCESS.pack(iova, count - 1) + bytes(count - 1))


def without_structure(message: Message) -> bytes:
    return reply(message, b"")


def silence(message: Message) -> bytes:
    return b""


@pytest.fixture
def nvme(connect: Connect) -> Nvme:
    nvme = connect()
    nvme.enable()
    return nvme


@pytest.mark.parametrize("answer", [error, short, other_count, without_structure])
@pytest.mark.parametrize("nsid", [NS_512, NS_FILE])
def test_data_that_the_client_refuses(nvme: Nvme, nsid: int, answer: Callable[[Message], bytes]) -> None:
    """The command fails with Data Transfer Error and changes nothing; the next one succeeds."""
    queue, answers = nvme.create_queue_pair(1, 8), Answers(nvme)
    nvme.write(queue, nsid, 5, b"\x11" * PAGE)
    buffer = nvme.ram.buffer(PAGE)
    answers.about(buffer, answer)
    assert nvme.io(queue, nv.WRITE, nsid, 5, buffer) == nv.DATA_TRANSFER_ERROR
    answers.twist = lambda message: None
    assert nvme.read(queue, nsid, 5, PAGE) == b"\x11" * PAGE
    assert nvme.io(queue, nv.WRITE, nsid, 5, buffer) == nv.OK


def test_data_that_the_client_does_not_take(nvme: Nvme) -> None:
    queue, answers = nvme.create_queue_pair(1, 8), Answers(nvme)
    buffer = nvme.ram.buffer(PAGE)
    answers.about(buffer, error)
    assert nvme.io(queue, nv.READ, NS_512, 5, buffer) == nv.DATA_TRANSFER_ERROR
    assert nvme.try_admin(nv.IDENTIFY, prp1=buffer.iova, cdw=[1]).status == nv.DATA_TRANSFER_ERROR
    assert nvme.identify(1)


def test_answers_to_nothing_are_ignored(nvme: Nvme) -> None:
    """Another id, another command, an answer twice."""
    queue, answers = nvme.create_queue_pair(1, 8), Answers(nvme)

    def twist(message: Message) -> bytes:
        iova, count = DMA_ACCESS.unpack_from(message.payload)
        for number, command in ((message.id ^ 1, message.command), (message.id ^ 0x8000, message.command)):
            nvme.client.send_raw(HEADER.pack(number, command, HEADER.size + 16, 1, 0) + DMA_ACCESS.pack(iova, count))
        other = DMA_READ + DMA_WRITE - message.command
        nvme.client.send_raw(HEADER.pack(message.id, other, HEADER.size + 16, 1, 0) + DMA_ACCESS.pack(iova, count))
        answers.truth(message)
        answers.truth(message)
        return b""

    answers.twist = twist
    for turn in range(10):
        nvme.write(queue, NS_512, turn, bytes([turn]) * 512)
        assert nvme.read(queue, NS_512, turn, 512) == bytes([turn]) * 512


def test_an_answer_in_pieces(nvme: Nvme) -> None:
    queue, answers = nvme.create_queue_pair(1, 8), Answers(nvme)

    def pieces(message: Message) -> bytes:
        iova, count = DMA_ACCESS.unpack_from(message.payload)
        if message.command == DMA_WRITE:
            answers.truth(message)
            return b""
        data = reply(message, DMA_ACCESS.pack(iova, count) + nvme.ram.dma_access(iova, count, None))
        for at in range(0, len(data), 700):
            nvme.client.send_raw(data[at : at + 700])
            time.sleep(0.001)
        return b""

    answers.twist = pieces
    nvme.write(queue, NS_512, 0, bytes(range(256)) * 16)
    answers.twist = lambda message: None
    assert nvme.read(queue, NS_512, 0, PAGE) == bytes(range(256)) * 16


def test_a_client_that_never_answers(nvme: Nvme, daemon: Daemon) -> None:
    """Data: the command fails after the timeout. Queues: CSTS.CFS; a reset does not wait and mends it."""
    queue, answers = nvme.create_queue_pair(1, 8), Answers(nvme)
    buffer = nvme.ram.buffer(PAGE)
    answers.about(buffer, silence)
    begin = time.monotonic()
    command = nvme.submit_io(queue, nv.WRITE, NS_512, 0, buffer)
    nvme.flush(queue, NS_512)  # others are not held up
    assert command.completion is None
    nvme.wait(command)
    assert command.status == nv.DATA_TRANSFER_ERROR and time.monotonic() - begin > TIMEOUT_S * 0.9
    answers.twist = silence
    nvme.submit(queue, nv.FLUSH, nsid=NS_512)
    nvme.client.serve_one()
    nvme.wait_csts(nv.CSTS_CFS, nv.CSTS_CFS)
    nvme.submit_io(queue, nv.WRITE, NS_512, 0, buffer)
    answers.twist = lambda message: None
    nvme.enable()
    queue = nvme.create_queue_pair(1, 8)
    nvme.write(queue, NS_512, 0, b"\x22" * 512)
    assert nvme.read(queue, NS_512, 0, 512) == b"\x22" * 512
    assert daemon.alive()


@pytest.mark.parametrize("how", ["enable", "device_reset", "close"])
def test_a_reset_does_not_wait_for_the_client(nvme: Nvme, how: str, daemon: Daemon) -> None:
    """QEMU answers nothing while it waits for the reply to the write of CC."""
    queue, answers = nvme.create_queue_pair(1, 8), Answers(nvme)
    buffer = nvme.ram.buffer(PAGE)
    answers.about(buffer, silence)
    for _ in range(5):
        nvme.submit_io(queue, nv.WRITE, NS_512, 0, buffer)
    while not any(buffer.iova <= iova < buffer.iova + PAGE for _, iova, _ in answers.seen):
        nvme.client.serve_one()
    begin = time.monotonic()
    if how == "close":
        nvme.client.close()
        while daemon.rpc("dpu_get_stats")["controllers"]:
            assert time.monotonic() - begin < nv.DEADLINE_S
    else:
        nvme.client.dma_unmap(*nvme.ram.windows[1][::2])
        if how == "device_reset":
            nvme.device_reset()
        nvme.enable()
        assert nvme.identify(1)
    assert time.monotonic() - begin < TIMEOUT_S, "it has waited for the timeout"


def test_a_reset_is_over_when_no_write_can_come_any_more(nvme: Nvme) -> None:
    """CSTS.RDY stays 1 until the client has answered a write that it may carry out late."""
    queue, answers = nvme.create_queue_pair(1, 8), Answers(nvme)
    buffer, late = nvme.ram.buffer(PAGE), list[Message]()

    def silence(message: Message) -> bytes:
        late.append(message)
        return b""

    answers.about(buffer, silence)
    nvme.submit_io(queue, nv.READ, NS_512, 0, buffer)
    while not late:
        nvme.client.serve_one()
    nvme.write32(nv.CC, 0)
    assert nvme.read32(nv.CSTS) & nv.CSTS_RDY
    nvme.write32(nv.CC, nv.CC_ENABLE)
    assert nvme.read32(nv.CSTS) & nv.CSTS_CFS, "enabled too early"
    nvme.write32(nv.CC, 0)
    answers.truth(late[0])
    nvme.wait_csts(nv.CSTS_RDY, 0)
    nvme.enable()
    assert nvme.identify(1)


def test_addresses_that_are_not_mapped_are_not_asked_for(nvme: Nvme) -> None:
    queue, answers = nvme.create_queue_pair(1, 8), Answers(nvme)
    outside = nvme.ram.windows[0][0] + nvme.ram.windows[0][2] + PAGE
    for prp1, prp2 in ((outside, 0), (nvme.ram.alloc(PAGE), outside), (outside | 0x7 << 60, 0)):
        for opcode in (nv.READ, nv.WRITE):
            fields: dict[str, Any] = {"nsid": NS_512, "prp1": prp1, "prp2": prp2, "cdw": [0, 0, 15]}
            assert nvme.execute(queue, opcode, **fields).status == nv.DATA_TRANSFER_ERROR
    assert all(iova < outside for _, iova, _ in answers.seen)


def test_requests_keep_to_the_client_s_size(connect: Connect) -> None:
    nvme = connect(capabilities={"max_data_xfer_size": 512, "max_msg_fds": 8})
    nvme.enable()
    answers = Answers(nvme)
    queue = nvme.create_queue_pair(1, 64)
    nvme.write(queue, NS_512, 0, bytes(range(256)) * 64)
    assert nvme.read(queue, NS_512, 0, 1 << 14) == bytes(range(256)) * 64
    assert max(size for _, _, size in answers.seen) <= 512


def test_shadow_doorbells_are_not_offered(nvme: Nvme) -> None:
    assert not nvme.identify(1)[257] & 1
    page = nvme.ram.alloc(2 * PAGE)
    assert nvme.try_admin(nv.DBBUF_CONFIG, prp1=page, prp2=page + PAGE).status == nv.INVALID_OPCODE


def test_mapped_doorbells_with_memory_that_is_not_shared(connect: Connect) -> None:
    nvme = connect(capabilities={})
    assert nvme.doorbells is not None
    nvme.enable()
    load = Load(nvme, nvme.create_queue_pair(1, 16), NS_512, depth=8)
    load.run(100)
    load.finish()


@pytest.mark.parametrize("point", ["command_loaded:40", "data_stored:40", "completion_stored:40"])
def test_kill_points(point: str) -> None:
    with running(point) as (_, target, death), connected(target, shared=False) as nvme:
        nvme.enable()
        load = Load(nvme, nvme.create_queue_pair(1, 64), NS_512, depth=16)
        load.run(5_000, until=death)
        assert death(), f"the worker never came to {point}"
        load.run(100)
        load.finish()
