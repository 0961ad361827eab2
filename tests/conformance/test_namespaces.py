"""Namespaces that come, go and change under their controllers, by RPC and by a guest's own commands.

Base 2.0: 3.2.1 (namespaces), 5.14 (Format NVM), 5.20 (Namespace Attachment), 5.21 (Namespace Management).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from dpu.spdk import Spdk
from tests.support import nvme_driver as nv
from tests.support.daemon import MIB, Daemon, RpcError, Target
from tests.support.load import Load
from tests.support.nvme_driver import PAGE, GuestRam, Nvme

NQN = "nqn.2026-01.io.test:shared"
MANAGE, ATTACHMENT, FORMAT = 0x0D, 0x15, 0x80
CHANGED_LOG = 4
SIZE = 8 * MIB
ALREADY_ATTACHED, PRIVATE, NOT_ATTACHED, LIST_INVALID = 0x118, 0x119, 0x11A, 0x11C
INVALID_FORMAT, INSUFFICIENT_CAPACITY = 0x10A, 0x115


class Pair:
    """A subsystem with namespaces 1 and 2 in memory and two controllers, CNTLID 1 and 2."""

    def __init__(self, daemon: Daemon, directory: Path) -> None:
        self.daemon = daemon
        for name in ("one", "two"):
            daemon.add_memory(name, SIZE)
        self.target = daemon.add_subsystem(NQN, ["one", "two"])
        self.second = Target(NQN, str(add_listener(daemon, directory / "second")))
        self.open: list[Nvme] = []

    def connect(self) -> tuple[Nvme, Nvme]:
        for target in (self.target, self.second):
            nvme = Nvme(target.path, GuestRam(16 * MIB), vectors=4)
            nvme.enable()
            nvme.set_feature(0x0B, 0x100)  # Namespace Attribute Notices
            self.open.append(nvme)
        return self.open[0], self.open[1]

    def close(self) -> None:
        for nvme in self.open:
            nvme.ram.check_canaries()
            nvme.close()
            nvme.ram.close()


def add_listener(daemon: Daemon, directory: Path) -> Path:
    directory.mkdir()
    address = {"trtype": "VFIOUSER", "traddr": str(directory), "trsvcid": "0"}
    daemon.rpc("nvmf_subsystem_add_listener", {"nqn": NQN, "listen_address": address})
    return directory / "cntrl"


@contextlib.contextmanager
def pair(kill_at: str = "") -> Iterator[Pair]:
    directory = Path(tempfile.mkdtemp(prefix="dpu-ns-"))
    env = {"DPU_EMU_KILL_AT": kill_at} if kill_at else {}
    try:
        with Daemon(directory, env=env, args=["--crash-limit", "0"]) as daemon:
            daemon.create_transport()
            made = Pair(daemon, directory)
            try:
                yield made
            except BaseException as error:
                error.add_note(repr(daemon))
                raise
            finally:
                made.close()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def both() -> Iterator[Pair]:
    with pair() as made:
        yield made


def attach(nvme: Nvme, nsid: int, cntlids: Sequence[int], *, detach: bool = False, count: int | None = None) -> int:
    """Namespace Attachment; its status."""
    page = nvme.ram.buffer(PAGE)
    words = [len(cntlids) if count is None else count, *cntlids]
    page.fill(struct.pack(f"<{len(words)}H", *words).ljust(PAGE, b"\0"))
    return nvme.try_admin(ATTACHMENT, nsid=nsid, prp1=page.iova, cdw=[int(detach)]).status


def active(nvme: Nvme) -> list[int]:
    return nsids(nvme.identify(2))


def nsids(data: bytes) -> list[int]:
    return [nsid for (nsid,) in struct.iter_unpack("<I", data) if nsid]


def cntlids(data: bytes) -> list[int]:
    (count,) = struct.unpack_from("<H", data)
    return list(struct.unpack_from(f"<{count}H", data, 2))


def changed(nvme: Nvme) -> list[int]:
    return nsids(nvme.get_log(CHANGED_LOG, PAGE))


def block_bytes(nvme: Nvme, nsid: int) -> int:
    data = nvme.identify(0, nsid)
    return int(1 << data[128 + 4 * (data[26] & 15) + 2])


def test_two_controllers_share_a_namespace(both: Pair) -> None:
    one, two = both.connect()
    assert (one.identify(1)[76], two.identify(1)[76]) == (0b10, 0b10), "CMIC: more than one controller"
    assert [struct.unpack_from("<H", nvme.identify(1), 78)[0] for nvme in (one, two)] == [1, 2]
    assert cntlids(one.identify(0x13)) == cntlids(two.identify(0x12, 1)) == [1, 2]
    assert cntlids(one.identify(0x13, cntid=2)) == [2], "from CNTID on"
    data = one.identify(0, 1)
    assert data[30] == 1, "NMIC: may be shared"
    assert data[24] & 2 == 0, "no atomic size of its own: two controllers may look"
    first, second = one.create_queue_pair(1, 64), two.create_queue_pair(1, 64)
    one.write(first, 1, 100, b"\x11" * 4096)
    assert two.read(second, 1, 100, 4096) == b"\x11" * 4096
    loads = [Load(one, first, 1, depth=16, blocks=2048), Load(two, second, 1, depth=16, first=2048, blocks=2048)]
    for _ in range(10):
        for load in loads:
            load.run(200)
    both.daemon.kill_worker()
    for load in loads:
        load.run(400)
        load.finish()


def test_a_listener_has_one_controller_at_a_time(both: Pair) -> None:
    both.connect()
    with pytest.raises((nv.NvmeError, OSError)):
        Nvme(both.target.path, GuestRam(4 * MIB), vectors=4)


def test_the_same_listener_is_the_same_controller(both: Pair) -> None:
    """What was detached from it stays so, whoever connects first after all have gone."""
    one, two = both.connect()
    assert attach(one, 2, [2], detach=True) == nv.OK
    both.close()
    both.open.clear()
    two = Nvme(both.second.path, GuestRam(4 * MIB), vectors=4)
    both.open.append(two)
    two.enable()
    assert active(two) == [1]


def test_detach_and_attach_are_told_each_time(both: Pair) -> None:
    one, two = both.connect()
    queue = one.create_queue_pair(1, 32)
    rpc = both.daemon.rpc
    for _ in range(3):
        event = one.aer()
        rpc("nvmf_ns_detach_controller", {"nqn": NQN, "nsid": 2, "cntlid": 1})
        one.wait(event)
        assert active(one) == [1] and active(two) == [1, 2]
        assert nsids(one.identify(0x10)) == [1, 2], "it is allocated still"
        assert one.identify(0, 2) == bytes(PAGE) and any(one.identify(0x11, 2))
        assert one.io(queue, nv.READ, 2, 0, one.ram.buffer(512)) == nv.INVALID_FIELD
        rpc("nvmf_ns_attach_controller", {"nqn": NQN, "nsid": 2, "cntlid": 1})
        assert changed(one) == [2], "several changes, one entry, one event"
        assert len(one.read(queue, 2, 0, 512)) == 512
    event = one.aer()
    assert one.identify(1) and event.completion is None, "the log was read: nothing is left to tell"
    assert changed(two) == []


@pytest.mark.parametrize(
    ("params", "named"),
    [({"nsid": 1, "cntlid": 1}, True), ({"nsid": 1, "cntlid": 9}, True), ({"nsid": 9, "cntlid": 1}, True)],
)
def test_attachment_by_rpc_is_checked(both: Pair, params: dict[str, int], named: bool) -> None:
    with pytest.raises(RpcError):
        both.daemon.rpc("nvmf_ns_attach_controller", {"nqn": NQN, **params})


def test_attachment_by_the_guest(both: Pair) -> None:
    one, two = both.connect()
    event = two.aer()
    assert attach(one, 1, [2], detach=True) == nv.OK
    two.wait(event)
    assert (active(one), active(two), changed(two)) == ([1, 2], [2], [1])
    assert cntlids(one.identify(0x12, 1)) == [1]
    assert attach(one, 1, [2], detach=True) == NOT_ATTACHED
    assert attach(one, 1, [1, 2]) == ALREADY_ATTACHED
    assert active(two) == [2], "all or none"
    assert attach(one, 1, [2]) == nv.OK and active(two) == [1, 2]
    for wrong in ([3], [2, 1], []):
        assert attach(one, 1, wrong) == LIST_INVALID
    assert attach(one, 1, [2], count=3) == LIST_INVALID
    assert attach(one, 5, [2]) == nv.INVALID_FIELD  # not allocated
    assert attach(one, 0xFFFFFFFF, [2]) == nv.INVALID_NAMESPACE
    assert one.try_admin(ATTACHMENT, nsid=1, prp1=one.ram.buffer(PAGE).iova, cdw=[2]).status == nv.INVALID_FIELD


def test_delete_by_the_guest(both: Pair) -> None:
    """The other controller is told; the bdev, which an operator has made, is still there."""
    one, two = both.connect()
    event = two.aer()
    assert one.try_admin(MANAGE, nsid=2, cdw=[1]).status == nv.OK
    two.wait(event)
    assert active(one) == active(two) == nsids(one.identify(0x10)) == [1]
    assert one.try_admin(MANAGE, nsid=2, cdw=[1]).status == nv.INVALID_FIELD
    (bdev,) = both.daemon.rpc("bdev_get_bdevs", {"name": "two"})
    assert bdev["claimed"] is False
    assert one.try_admin(MANAGE, nsid=0xFFFFFFFF, cdw=[1]).status == nv.OK
    assert active(one) == []


def test_format_changes_block_size_and_erases(both: Pair) -> None:
    one, two = both.connect()
    first, second = one.create_queue_pair(1, 64), two.create_queue_pair(1, 64)
    data = one.identify(0, 1)
    assert data[25] == 1 and [data[130], data[134]] == [9, 12], "two LBA formats"
    one.write(first, 1, 0, b"\xaa" * 8192)
    load = Load(two, second, 2, depth=16, blocks=2048)  # another namespace goes on
    load.run(200)
    event = two.aer()
    command = one.submit(one.sqs[0], FORMAT, nsid=1, cdw=[1])
    load.run(200)
    one.wait(command)
    assert command.status == nv.OK
    two.wait(event)
    assert changed(two) == [1]
    for nvme, queue in ((one, first), (two, second)):
        assert block_bytes(nvme, 1) == 4096
        assert struct.unpack_from("<Q", nvme.identify(0, 1))[0] == SIZE // 4096
        assert nvme.read(queue, 1, 0, 8192, block=4096) == bytes(8192)
        last = SIZE // 4096
        assert nvme.io(queue, nv.READ, 1, last, nvme.ram.buffer(4096), block=4096) == nv.LBA_OUT_OF_RANGE
    one.write(first, 1, SIZE // 4096 - 1, b"\xbb" * 4096, block=4096)
    both.daemon.kill_worker()
    assert two.read(second, 1, SIZE // 4096 - 1, 4096, block=4096) == b"\xbb" * 4096
    assert one.try_admin(FORMAT, nsid=1, cdw=[0 | 1 << 9]).status == nv.OK, "back, with user data erase"
    assert block_bytes(one, 1) == 512
    assert one.read(first, 1, SIZE // 512 - 8, 4096) == bytes(4096)
    load.run(200)
    load.finish()


@pytest.mark.parametrize(
    ("nsid", "cdw10", "status"),
    [
        (1, 2, INVALID_FORMAT),
        (1, 1 << 4, INVALID_FORMAT),
        (1, 1 << 5, INVALID_FORMAT),
        (1, 2 << 9, nv.INVALID_FIELD),
        (5, 0, nv.INVALID_FIELD),
        (0xFFFFFFFF, 0, nv.INVALID_FIELD),
        (0, 0, nv.INVALID_NAMESPACE),
    ],
)
def test_format_is_checked(both: Pair, nsid: int, cdw10: int, status: int) -> None:
    one, _ = both.connect()
    queue = one.create_queue_pair(1, 8)
    one.write(queue, 1, 0, b"\xcc" * 512)
    assert one.try_admin(FORMAT, nsid=nsid, cdw=[cdw10]).status == status
    assert one.read(queue, 1, 0, 512) == b"\xcc" * 512


@pytest.mark.parametrize("kind", ["null", "file"])
def test_resize_under_io(both: Pair, kind: str) -> None:
    """Grown and shrunk: each controller is told, and what is beyond the end is refused at once."""
    daemon = both.daemon
    image = daemon.directory / "disk.img"
    with image.open("wb") as file:
        file.truncate(SIZE)
    if kind == "null":
        daemon.rpc("bdev_null_create", {"name": "r", "num_blocks": SIZE // 512, "block_size": 512})
    else:
        parameters = {"name": "r", "filename": str(image), "block_size": 512, "fallocate": True}
        daemon.rpc("bdev_aio_create", parameters)

    def resize(size: int) -> None:
        if kind == "null":
            daemon.rpc("bdev_null_resize", {"name": "r", "new_size": size // MIB})
        else:
            os.truncate(image, size)
            daemon.rpc("bdev_aio_rescan", {"name": "r"})

    daemon.rpc("nvmf_subsystem_add_ns", {"nqn": NQN, "namespace": {"bdev_name": "r", "nsid": 3}})
    one, two = both.connect()
    first, second = one.create_queue_pair(1, 64), two.create_queue_pair(1, 64)
    load = Load(one, first, 1, depth=16, blocks=2048)
    marked = one.submit(first, nv.WRITE_UNCORRECTABLE, nsid=3, cdw=[8, 0, 0])
    one.wait(marked)
    assert marked.status == nv.OK
    for size in (2 * SIZE, SIZE // 2, 4 * SIZE, SIZE):
        event = two.aer()
        resize(size)
        two.wait(event)
        assert changed(two) == [3]
        last = size // 512 - 1
        for nvme, queue in ((one, first), (two, second)):
            assert struct.unpack_from("<Q", nvme.identify(0, 3))[0] == last + 1
            nvme.write(queue, 3, last, b"\x77" * 512)
            assert nvme.io(queue, nv.READ, 3, last + 1, nvme.ram.buffer(512)) == nv.LBA_OUT_OF_RANGE
            assert nvme.io(queue, nv.READ, 3, 8, nvme.ram.buffer(512)) == nv.UNRECOVERED_READ_ERROR, "marks stay"
        load.run(100)
    daemon.kill_worker()
    assert one.io(first, nv.READ, 3, 8, one.ram.buffer(512)) == nv.UNRECOVERED_READ_ERROR
    load.finish()


def test_the_reply_says_who_was_not_told(both: Pair) -> None:
    one, two = both.connect()
    two.set_feature(0x0B, 0)
    with Spdk(both.daemon.rpc_path) as card:
        card.nvmf_ns_detach_controller(nqn=NQN, nsid=2, cntlid=1)
        assert card.warnings == []
        card.nvmf_ns_detach_controller(nqn=NQN, nsid=2, cntlid=2)
        (warning,) = card.warnings
        assert "controller 2" in warning and "Namespace Attribute Notices" in warning
        one.disable()
        card.nvmf_ns_attach_controller(nqn=NQN, nsid=2, cntlid=1)
        assert card.warnings == [], "a controller that is not enabled will look when it is"


def test_smart_counters_outlive_the_connection(both: Pair) -> None:
    """Also when the worker is killed: commands, power cycles, shutdowns that were none, errors."""
    one, two = both.connect()
    queue = one.create_queue_pair(1, 16)
    for lba in range(10):
        one.write(queue, 1, lba, bytes(512))
    assert one.try_admin(0x3F).status == nv.INVALID_OPCODE
    both.daemon.kill_worker()
    for lba in range(5):
        one.read(queue, 1, lba, 512)
    one.close()
    both.open.remove(one)
    again = Nvme(both.target.path, GuestRam(4 * MIB), vectors=4)
    both.open.append(again)
    both.daemon.kill_worker()
    again.enable()

    def smart(nvme: Nvme, nsid: int = 0xFFFFFFFF) -> dict[str, int]:
        page = nvme.get_log(2, 512, nsid=nsid)
        words = {"reads": 64, "writes": 80, "cycles": 112, "unsafe": 144, "errors": 176}
        return {name: int.from_bytes(page[at : at + 16], "little") for name, at in words.items()}

    assert smart(again) == {"reads": 5, "writes": 10, "cycles": 2, "unsafe": 1, "errors": 1}
    assert smart(again, 2)["reads"] == 0
    assert smart(two)["cycles"] == 1
    again.shutdown()
    again.close()
    both.open.remove(again)
    third = Nvme(both.target.path, GuestRam(4 * MIB), vectors=4)
    both.open.append(third)
    third.enable()
    assert (smart(third)["cycles"], smart(third)["unsafe"]) == (3, 1)


def create(nvme: Nvme, blocks: int, *, flbas: int = 0, shared: bool = True) -> nv.Completion:
    """Namespace Management, create; its completion."""
    page = nvme.ram.buffer(PAGE)
    data = bytearray(PAGE)
    struct.pack_into("<QQ", data, 0, blocks, blocks)
    data[26], data[30] = flbas, int(shared)
    page.fill(bytes(data))
    return nvme.try_admin(MANAGE, prp1=page.iova, cdw=[0])


def with_pool(made: Pair, size: int = 64 * MIB) -> None:
    made.daemon.add_memory("pool", size)
    made.daemon.rpc("bdev_lvol_create_lvstore", {"bdev_name": "pool", "lvs_name": "vg"})
    made.daemon.rpc("nvmf_subsystem_set_ns_pool", {"nqn": NQN, "lvs_name": "vg"})


def capacity(nvme: Nvme) -> tuple[int, int]:
    data = nvme.identify(1)
    return int.from_bytes(data[280:296], "little"), int.from_bytes(data[296:312], "little")


def lvols(made: Pair) -> int:
    return len(made.daemon.rpc("bdev_lvol_get_lvols"))


def test_guests_make_namespaces_of_a_pool(both: Pair) -> None:
    """Create, attach, use, format, delete: the room comes back, and what was there is not shown again."""
    one, two = both.connect()
    assert capacity(one) == (2 * SIZE, 0)
    assert create(one, 2048).status == INSUFFICIENT_CAPACITY, "no pool was given"
    with_pool(both)
    total, free = capacity(one)
    assert total == 2 * SIZE + free and free > 60 * MIB
    made = create(one, 8 * MIB // 4096, flbas=1)
    assert (made.status, made.dw0) == (nv.OK, 3)
    assert capacity(one)[1] == free - 8 * MIB
    assert active(one) == active(two) == [1, 2] and nsids(one.identify(0x10)) == [1, 2, 3]
    assert struct.unpack_from("<Q", one.identify(0x11, 3))[0] == 8 * MIB // 4096
    event = two.aer()
    assert attach(one, 3, [1, 2]) == nv.OK
    two.wait(event)
    first, second = one.create_queue_pair(1, 64), two.create_queue_pair(1, 64)
    load = Load(one, first, 3, depth=16, block=4096, blocks=1024)
    load.run(500)
    both.daemon.kill_worker()
    load.run(200)
    load.finish()
    one.write(first, 3, 0, b"\xaa" * 4096, block=4096)
    assert two.read(second, 3, 0, 4096, block=4096) == b"\xaa" * 4096
    assert one.try_admin(FORMAT, nsid=3, cdw=[0]).status == nv.OK
    assert two.read(second, 3, 0, 4096) == bytes(4096)
    one.write(first, 3, 0, b"\xbb" * 4096)
    assert one.try_admin(MANAGE, nsid=3, cdw=[1]).status == nv.OK
    assert capacity(one)[1] == free and lvols(both) == 0
    again = create(one, 60 * MIB // 512)
    assert (again.status, again.dw0) == (nv.OK, 3) and attach(one, 3, [1]) == nv.OK
    for lba in range(0, 60 * MIB // 512, 256):
        assert one.read(first, 3, lba, 131072) == bytes(131072), f"block {lba} shows what another had"
    assert create(one, 60 * MIB // 512).status == INSUFFICIENT_CAPACITY
    private = create(one, 2048, shared=False)
    assert private.status == nv.OK and attach(one, private.dw0, [1]) == nv.OK
    assert attach(one, private.dw0, [2]) == PRIVATE
    with pytest.raises(RpcError):
        both.daemon.rpc("nvmf_subsystem_set_ns_pool", {"nqn": NQN, "lvs_name": "nowhere"})


@pytest.mark.parametrize("point", ["namespace_made", "namespace_before_store", "namespace_stored", "namespace_told"])
def test_a_creation_or_deletion_cut_by_a_kill_leaves_nothing_over(point: str) -> None:
    """The first hit is in create, the second in delete (but namespace_made)."""
    for hit in (1,) if point == "namespace_made" else (1, 2):
        with pair(f"{point}:{hit}") as made:
            one, _ = made.connect()
            with_pool(made)
            worker, free = made.daemon.worker_pid(), capacity(one)[1]
            created = create(one, 2048)
            assert (created.status, created.dw0, lvols(made)) == (nv.OK, 3, 1)
            assert capacity(one)[1] == free - MIB
            assert one.try_admin(MANAGE, nsid=3, cdw=[1]).status == nv.OK
            assert nsids(one.identify(0x10)) == [1, 2]
            assert (lvols(made), capacity(one)[1]) == (0, free)
            assert made.daemon.worker_pid() != worker


POINTS = ["namespace_before_store", "namespace_stored", "namespace_told"]
CUTS = [(what, point) for what in ("detach", "delete", "format") for point in POINTS] + [("format", "format_erased")]


@pytest.mark.parametrize(("what", "point"), CUTS)
def test_a_change_cut_by_a_kill_is_made_once(what: str, point: str) -> None:
    """The command that was cut ends with success, as it would have without the kill, and every controller knows."""
    with pair(point) as made:
        one, two = made.connect()
        event = two.aer()
        killed = made.daemon.worker_pid()
        if what == "detach":
            assert attach(one, 2, [2], detach=True) == nv.OK
        elif what == "delete":
            assert one.try_admin(MANAGE, nsid=2, cdw=[1]).status == nv.OK
        else:
            assert one.try_admin(FORMAT, nsid=2, cdw=[1]).status == nv.OK
        assert made.daemon.worker_pid() != killed, "the point was never reached"
        two.wait(event)
        assert changed(two) == [2]
        assert active(two) == ([1, 2] if what == "format" else [1])
        assert active(one) == ([1] if what == "delete" else [1, 2])
        if what == "format":
            assert block_bytes(one, 2) == block_bytes(two, 2) == 4096
