"""SPDK's initiator as recorded: its messages in their order, its unsealed memory, mapped doorbells, polled queues.

Every message has id 0 and flags 0; VERSION is 4 bytes (0.1) without JSON; region information is asked for with room
for 4064 bytes; one DMA_MAP with a descriptor; no interrupt, no reset, no unmap: it just closes. Measured with SPDK
v26.05.
"""

from __future__ import annotations

import os
import random
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support import nvme_driver as nv
from tests.support.daemon import NS_512, NS_FILE, Daemon, Target
from tests.support.load import Load
from tests.support.nvme_driver import PAGE, GuestRam, Nvme
from tests.support.vfio_user_client import BAR0, CONFIG_REGION, VfioUserClient, VfioUserError
from tests.support.witness import Witness

ARGSZ = 4064
ANSWER_BYTES_MAX = 4096
MEMORY_BYTES = 256 << 20
TRANSFER_MAX = 128 << 10


class OneId(VfioUserClient):
    """All messages have id 0; no answer is longer than the initiator's buffer."""

    def send(self, command: int, payload: bytes = b"", **fields: Any) -> int:
        return super().send(command, payload, **{**fields, "message_id": 0})

    def receive(self) -> Any:
        message = super().receive()
        assert message.flags in (1, 0x21) and len(message.payload) <= ANSWER_BYTES_MAX  # a reply, an error
        return message


class Initiator(Nvme):
    """Attaches as SPDK does; the queues and commands are the driver's."""

    def __init__(self, path: str, ram: GuestRam) -> None:
        self.ram, self.register_bytes, self.deadline_s = ram, 8, nv.DEADLINE_S
        self.eventfds, self.interrupts = [], []
        self.sqs, self.cqs, self.shadow, self.event_idx = {}, {}, None, None
        self.doorbell_writes = self.stale = 0
        self.client = OneId(path)
        self.client.negotiate({}, version=(0, 1))
        self.client.device_info()
        self.regions = [self.client.region_info(index, ARGSZ) for index in range(9)]
        self.doorbells = self._map_doorbells()
        assert self.doorbells is not None, "without mapped doorbells it does not attach"
        iova, offset, size = ram.windows[0]
        self.client.dma_map(iova, size, ram.fd, offset=offset)
        command = struct.unpack("<H", self.client.region_read(CONFIG_REGION, 4, 2))[0]
        self.client.region_write(CONFIG_REGION, 4, struct.pack("<H", command | 0x404))


@pytest.fixture(scope="module")
def target(daemon: Daemon) -> Target:
    return daemon.standard_target(listener={"allow_unsealed_memory": True})


@pytest.fixture(scope="module")
def other_guest(daemon: Daemon, target: Target) -> Iterator[Witness]:
    """Another client, with memory that is sealed, by a listener without the option."""
    witness = Witness(daemon)
    yield witness
    witness.close()


@pytest.fixture
def attach(daemon: Daemon, target: Target) -> Iterator[Callable[[], Initiator]]:
    made: list[Initiator] = []

    def attach() -> Initiator:
        # Addresses are its own virtual ones. Canaries are not looked at afterwards: some tests have no memory then.
        ram = GuestRam(MEMORY_BYTES, iova=0x2000_0020_0000, second=0, sealed=False)
        made.append(Initiator(target.path, ram))
        return made[-1]

    yield attach
    for one in made:
        one.close()
        one.ram.close()


def test_it_attaches_and_does_verified_io(attach: Callable[[], Initiator], daemon: Daemon) -> None:
    nvme = attach()
    cap = int.from_bytes(nvme.client.region_read(BAR0, nv.CAP, 8), "little")
    assert cap & 0xFFFF >= 255, "a queue of 256 entries"
    nvme.enable(32)
    nvme.identify(1)
    nvme.set_feature(0x07, 0)  # one queue pair, 0's based
    queue = nvme.create_queue_pair(1, 256, vector=-1)
    dice = random.Random(5)
    for turn in range(40):
        size = dice.randrange(1, TRANSFER_MAX // 512 + 1) * 512
        slba, data = dice.randrange(4096), dice.randbytes(size)
        nvme.write(queue, NS_512, slba, data)
        assert nvme.read(queue, NS_512, slba, size) == data, f"turn {turn}"
    load = Load(nvme, queue, NS_FILE, depth=128)
    load.run(500)
    daemon.kill_worker()
    load.run(300)
    load.finish()
    nvme.ram.check_canaries()


def test_it_comes_again_after_it_has_just_closed(attach: Callable[[], Initiator]) -> None:
    for turn in range(5):
        nvme = attach()
        nvme.enable(32)
        queue = nvme.create_queue_pair(1, 256, vector=-1)
        buffer = nvme.ram.buffer(PAGE)
        for _ in range(turn):
            nvme.submit_io(queue, nv.READ, NS_FILE, 0, buffer)  # under way when it closes
        nvme.write(queue, NS_512, turn, bytes([turn]) * 512)
        assert nvme.read(queue, NS_512, turn, 512) == bytes([turn]) * 512
        nvme.close()


def test_unsealed_memory_is_refused_without_the_option(daemon: Daemon, other_guest: Witness) -> None:
    ram = GuestRam(1 << 20, second=0, sealed=False)
    listener = daemon.add_subsystem("nqn.2026-01.io.test:sealed", [daemon.add_memory("sealed", 1 << 20)])
    with pytest.raises(VfioUserError, match="Invalid argument"):
        Initiator(listener.path, ram)
    assert "allow_unsealed_memory" in daemon.log()
    ram.close()


@pytest.mark.parametrize("what", ["queues", "admin data", "data"])
def test_memory_that_is_taken_away_hurts_its_owner_only(
    attach: Callable[[], Initiator], daemon: Daemon, other_guest: Witness, what: str
) -> None:
    """ftruncate of the file under live queues: the next access is a SIGBUS in control or in a poller. The connection
    is closed; the worker lives on and another client's data are right."""
    worker = daemon.worker_pid()
    nvme = attach()
    nvme.enable(32)
    queue = nvme.create_queue_pair(1, 256, vector=-1)
    other_guest.check()
    buffer = nvme.ram.buffer(PAGE)
    kept = 0 if what == "queues" else nvme.ram.offset_of(buffer.iova)
    if what == "admin data":
        nvme.submit(nvme.sqs[0], nv.IDENTIFY, prp1=buffer.iova, cdw=[1], ring=False)
    else:
        nvme.submit_io(queue, nv.READ, NS_512, 0, buffer, ring=False)
    doorbell = (0, nvme.sqs[0].tail) if what == "admin data" else (2, queue.tail)
    os.ftruncate(nvme.ram.fd, kept)  # from here on our own mapping must not be touched either
    nvme.doorbell(*doorbell)
    assert nvme.client.sock.recv(1) == b"", "the connection is not closed"
    other_guest.check()
    assert daemon.worker_pid() == worker and "truncated" in daemon.log()


def test_memory_that_is_taken_away_from_the_kernel(attach: Callable[[], Initiator], daemon: Daemon) -> None:
    """io_uring meets the hole: the command fails with Data Transfer Error, and nothing else happens."""
    worker = daemon.worker_pid()
    nvme = attach()
    nvme.enable(32)
    queue = nvme.create_queue_pair(1, 256, vector=-1)
    buffer = nvme.ram.buffer(PAGE)
    command = nvme.submit_io(queue, nv.READ, NS_FILE, 0, buffer, ring=False)
    os.ftruncate(nvme.ram.fd, nvme.ram.offset_of(buffer.iova))
    nvme.doorbell(2, queue.tail)
    queue.tail_rung = queue.tail
    nvme.wait(command)
    assert command.status == nv.DATA_TRANSFER_ERROR
    assert daemon.worker_pid() == worker


def test_controllers_of_closed_connections_are_gone(attach: Callable[[], Initiator], daemon: Daemon) -> None:
    attach().close()
    deadline = time.monotonic() + nv.DEADLINE_S
    while daemon.rpc("nvmf_subsystem_get_controllers", {"nqn": "nqn.2026-01.io.test:standard"}):
        assert time.monotonic() < deadline
