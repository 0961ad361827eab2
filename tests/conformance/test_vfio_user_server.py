"""The vfio-user server against the specification (vfio-user.rst), message by message, over a real connection."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator

import pytest

from tests.support import vfio_user_client as vu
from tests.support.daemon import Daemon, Target
from tests.support.nvme_driver import GuestRam, Nvme
from tests.support.vfio_user_client import VfioUserClient, VfioUserError

ADDRESS = 0x10_0000


@pytest.fixture
def client(daemon: Daemon, target: Target) -> Iterator[VfioUserClient]:
    """A connection after VERSION."""
    with VfioUserClient(target.path) as client:
        client.negotiate()
        yield client
    assert daemon.alive()


@pytest.fixture
def fresh(daemon: Daemon, target: Target) -> Iterator[VfioUserClient]:
    """A connection before VERSION."""
    with VfioUserClient(target.path) as client:
        yield client
    assert daemon.alive()


@pytest.fixture
def ram() -> Iterator[GuestRam]:
    ram = GuestRam(1 << 20)
    yield ram
    ram.check_canaries()
    ram.close()


def error_of(client: VfioUserClient, command: int, payload: bytes, fds: list[int] | None = None) -> int:
    """The errno of the error reply; 0 if it succeeded."""
    try:
        client.request(command, payload, fds=fds or [])
    except VfioUserError as error:
        assert error.errno is not None
        return error.errno
    return 0


# --- VERSION


def test_version_of_qemu(fresh: VfioUserClient) -> None:
    fresh.negotiate()
    assert fresh.version[0] == 0
    assert fresh.capabilities.get("max_data_xfer_size", 1 << 20) >= 4096
    assert "write_multiple" not in fresh.capabilities, "WRITE_MULTI is not implemented"


def test_version_reply_is_not_longer_than_the_request(fresh: VfioUserClient) -> None:
    """QEMU reads the reply into its request's buffer."""
    text = b'{"capabilities":{"max_msg_fds":16,"max_data_xfer_size":1048576,"pgsizes":4096}}\0'
    reply = fresh.request(vu.VERSION, struct.pack("<HH", 0, 0) + text)
    assert len(reply.payload) <= 4 + len(text)
    assert reply.payload.endswith(b"\0")


def test_version_of_spdk(fresh: VfioUserClient) -> None:
    """Four bytes, no JSON, message id 0: the reply has no JSON either or one that ends in NUL."""
    message_id = fresh.send(vu.VERSION, struct.pack("<HH", 0, 1), message_id=0)
    reply = fresh.wait_reply(message_id, vu.VERSION)
    assert struct.unpack_from("<H", reply.payload)[0] == 0
    for index in range(9):
        fresh.send(vu.REGION_INFO, vu.REGION_INFO_BODY.pack(4064, 0, index, 0, 0, 0) + bytes(4032), message_id=0)
        reply = fresh.wait_reply(0, vu.REGION_INFO)
        assert vu.REGION_INFO_BODY.unpack_from(reply.payload)[2] == index
        for fd in reply.fds:
            os.close(fd)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\0\0",
        struct.pack("<HH", 1, 0),
        struct.pack("<HH", 0xFFFF, 0xFFFF),
        struct.pack("<HH", 0, 0) + b"{}",
        struct.pack("<HH", 0, 0) + b"not json\0",
        struct.pack("<HH", 0, 0) + b"[1]\0",
        struct.pack("<HH", 0, 0) + b'{"capabilities":7}\0',
        struct.pack("<HH", 0, 0) + b"[" * 5000 + b"\0",
        struct.pack("<HH", 0, 0) + b"\xff\xfe\0",
    ],
)
def test_bad_version_is_refused(fresh: VfioUserClient, payload: bytes) -> None:
    """Refused with EINVAL (or the connection is closed, which the specification allows)."""
    try:
        assert error_of(fresh, vu.VERSION, payload) == errno.EINVAL
    except ConnectionError:
        return


def test_unknown_capabilities_are_ignored(fresh: VfioUserClient) -> None:
    fresh.negotiate({"max_msg_fds": 4, "something_new": {"a": [1, 2]}, "twin_socket": False})
    assert fresh.alive()


def test_version_comes_first_and_once(fresh: VfioUserClient) -> None:
    try:
        assert error_of(fresh, vu.DEVICE_GET_INFO, vu.FOUR_WORDS.pack(16, 0, 0, 0)) != 0
        fresh.negotiate()
        assert error_of(fresh, vu.VERSION, struct.pack("<HH", 0, 0)) != 0
        assert fresh.alive()
    except ConnectionError:
        return


# --- what the device is


def test_device_info(client: VfioUserClient) -> None:
    flags, regions, irqs = client.device_info()
    assert flags & 3 == 3, "reset supported, PCI device"
    assert (regions, irqs) == (9, 5)


def test_regions(client: VfioUserClient) -> None:
    regions = [client.region_info(index) for index in range(9)]
    assert regions[0].size >= 0x1000 + 65 * 8 and regions[0].flags & 3 == 3, "BAR0 holds 65 doorbell pairs"
    assert regions[7].size in (256, 4096) and regions[7].flags & 3 == 3, "configuration space"
    assert regions[6].size == 0, "no expansion ROM"
    for region in regions:
        for fd in region.fds:
            os.close(fd)
        if region.flags & 4:
            assert region.fds, "a region that can be mapped comes with a descriptor"
        for offset, size in region.windows:
            assert offset % 4096 == 0 and size % 4096 == 0 and offset + size <= region.size


def test_info_requests_with_a_bad_argsz_or_index(client: VfioUserClient) -> None:
    assert error_of(client, vu.DEVICE_GET_INFO, vu.FOUR_WORDS.pack(8, 0, 0, 0)) == errno.EINVAL
    assert error_of(client, vu.REGION_INFO, vu.REGION_INFO_BODY.pack(31, 0, 0, 0, 0, 0)) == errno.EINVAL
    for index in (9, 0x7FFFFFFF, 0xFFFFFFFF):
        assert error_of(client, vu.REGION_INFO, vu.REGION_INFO_BODY.pack(32, 0, index, 0, 0, 0)) == errno.EINVAL
    for index in (5, 0xFFFFFFFF):
        assert error_of(client, vu.IRQ_INFO, vu.FOUR_WORDS.pack(16, 0, index, 0)) == errno.EINVAL
    assert client.alive()


def test_irqs(client: VfioUserClient) -> None:
    assert client.irq_info(vu.MSIX_INDEX)[1] >= 65, "a vector for each queue pair"
    assert client.irq_info(vu.MSIX_INDEX)[0] & 1, "signalled by eventfd"
    assert client.irq_info(3)[1] == 1, "the error interrupt exists"


# --- PCI configuration space


def test_configuration_space(client: VfioUserClient) -> None:
    config = client.region_read(vu.CONFIG_REGION, 0, 256)
    assert config[9:12] == b"\x02\x08\x01", "class code: NVM Express I/O controller"
    assert config[0:2] not in (b"\0\0", b"\xff\xff") and config[0:4] != b"\x36\x1b\x10\x00"
    assert config[6] & 0x10, "capability list"
    seen, position = {}, config[0x34]
    while position:
        assert position >= 0x40 and position % 4 == 0 and position not in seen
        seen[position] = config[position]
        position = config[position + 1]
    assert {0x11, 0x10} <= set(seen.values()), "MSI-X and PCI Express"
    msix = next(at for at, kind in seen.items() if kind == 0x11)
    control, table, pending = struct.unpack_from("<HII", config, msix + 2)
    assert (control & 0x7FF) + 1 == client.irq_info(vu.MSIX_INDEX)[1], "table size is 0's based"
    for pointer, entry_bits in ((table, 128), (pending, 1)):
        region = client.region_info(pointer & 7)
        assert region.size >= (pointer & ~7) + ((control & 0x7FF) + 1) * entry_bits // 8


def test_read_only_configuration_bits(client: VfioUserClient) -> None:
    before = client.region_read(vu.CONFIG_REGION, 0, 256)
    for at in (0, 2, 8, 10, 0x30, 0x32, 0x34):
        client.region_write(vu.CONFIG_REGION, at, b"\xff\xff")
    after = client.region_read(vu.CONFIG_REGION, 0, 256)
    assert after[0:4] == before[0:4] and after[8:12] == before[8:12]
    assert after[0x30:0x34] == bytes(4), "no ROM BAR"
    assert after[0x34] == before[0x34]
    client.region_write(vu.CONFIG_REGION, 4, struct.pack("<H", 0x0406))
    assert struct.unpack("<H", client.region_read(vu.CONFIG_REGION, 4, 2))[0] & 0x0406 == 0x0406
    client.region_write(vu.CONFIG_REGION, 4, struct.pack("<H", 0))
    assert struct.unpack("<H", client.region_read(vu.CONFIG_REGION, 4, 2))[0] & 0x0406 == 0


def test_whole_configuration_space_can_be_written(client: VfioUserClient) -> None:
    """Every offset with every width a CPU has; the device stays what it is."""
    size = client.region_info(vu.CONFIG_REGION).size
    identity = client.region_read(vu.CONFIG_REGION, 0, 4)
    for width in (1, 2, 4):
        for at in (*range(0, 256, width), *range(256, size, 64)):
            client.region_write(vu.CONFIG_REGION, at, b"\xa5" * width)
    assert client.region_read(vu.CONFIG_REGION, 0, 4) == identity
    client.reset()
    assert client.alive()


# --- region accesses


@pytest.mark.parametrize(
    "offset, region, count",
    [
        (0, 9, 4),
        (0, 0xFFFFFFFF, 4),
        (0, 1, 4),
        (0, 6, 4),
        (0, 0, 0),
        (1 << 40, 0, 4),
        (2**64 - 4, 0, 8),
        (2**64 - 1, 0, 1),
        (0, 7, 5000),
        (4095, 7, 4),
        (0, 0, 0xFFFFFFFF),
        (0, 0, 1 << 21),
    ],
)
def test_accesses_outside_a_region(client: VfioUserClient, offset: int, region: int, count: int) -> None:
    body = vu.REGION_ACCESS.pack(offset, region, count)
    assert error_of(client, vu.REGION_READ, body) == errno.EINVAL
    if count < 10_000:
        assert error_of(client, vu.REGION_WRITE, body + bytes(count)) == errno.EINVAL
    assert client.alive()


def test_count_that_contradicts_the_size(client: VfioUserClient) -> None:
    for count, data in ((4, b""), (4, b"abc"), (4, b"abcde"), (0, b"abcd"), (0xFFFFFFFF, b"abcd")):
        body = vu.REGION_ACCESS.pack(0x14, 0, count) + data
        assert error_of(client, vu.REGION_WRITE, body) == errno.EINVAL
    assert error_of(client, vu.REGION_READ, vu.REGION_ACCESS.pack(0, 0, 4) + b"more") == errno.EINVAL
    assert error_of(client, vu.REGION_READ, vu.REGION_ACCESS.pack(0, 0, 4)[:-1]) == errno.EINVAL
    assert client.alive()


def test_odd_accesses_of_registers_do_no_harm(client: VfioUserClient) -> None:
    for offset in (0, 1, 3, 0x14, 0x15, 0x1C, 0xFFE, 0xFFF, 0x1000, 0x1001):
        for count in (1, 2, 3, 5, 8, 16, 64):
            body = vu.REGION_ACCESS.pack(offset, 0, count)
            assert error_of(client, vu.REGION_READ, body) in (0, errno.EINVAL)
            if offset not in (0x14, 0x15):
                assert error_of(client, vu.REGION_WRITE, body + bytes(count)) in (0, errno.EINVAL)
    assert client.alive()


def test_msix_regions_are_readable(client: VfioUserClient) -> None:
    for index in (4, 5):
        size = client.region_info(index).size
        if size:
            assert len(client.region_read(index, 0, 16)) == 16


# --- headers


def test_message_id_is_echoed(client: VfioUserClient) -> None:
    for message_id in (0, 1, 0x7FFF, 0xFFFF, 5, 5):
        client.send(vu.DEVICE_GET_INFO, vu.FOUR_WORDS.pack(16, 0, 0, 0), message_id=message_id)
        reply = client.wait_reply(message_id, vu.DEVICE_GET_INFO)
        assert reply.flags == vu.FLAG_REPLY and reply.errno == 0


def test_posted_messages_get_no_reply(client: VfioUserClient) -> None:
    """Also those in error; the next reply belongs to the next request."""
    client.post_region_write(vu.CONFIG_REGION, 4, b"\x06\x04")
    client.post_region_write(99, 0, b"\0\0\0\0")
    client.send(vu.DMA_UNMAP, vu.DMA_UNMAP_BODY.pack(24, 0, 0xDEAD000, 4096), flags=vu.FLAG_NO_REPLY)
    client.send(77, b"", flags=vu.FLAG_NO_REPLY)
    assert client.region_read(vu.CONFIG_REGION, 4, 2) == b"\x06\x04"


def test_pipelined_requests_are_answered_in_order(client: VfioUserClient) -> None:
    expected = [client.region_read(7, 4 * n, 4) for n in range(4)]
    ids = [client.send(vu.REGION_READ, vu.REGION_ACCESS.pack(4 * (n % 4), 7, 4)) for n in range(100)]
    replies = [client.wait_reply(message_id, vu.REGION_READ).payload[16:] for message_id in ids]
    assert replies == expected * 25


@pytest.mark.parametrize("command", [0, 14, 15, 16, 17, 18, 19, 255, 0xFFFF, vu.DMA_READ, vu.DMA_WRITE])
def test_commands_that_do_not_exist_for_a_server(client: VfioUserClient, command: int) -> None:
    assert error_of(client, command, bytes(32)) in (errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)
    assert client.alive()


@pytest.mark.parametrize("flags", [0x1, 0x2, 0xF, 0x20, 0x21])
def test_message_types_that_a_client_must_not_send(client: VfioUserClient, flags: int) -> None:
    """A reply to nothing, a reserved type: an error reply, silence or the end of the connection; no harm."""
    client.send(vu.DEVICE_GET_INFO, vu.FOUR_WORDS.pack(16, 0, 0, 0), flags=flags, message_id=4000)
    try:
        message_id = client.send(vu.DEVICE_GET_INFO, vu.FOUR_WORDS.pack(16, 0, 0, 0), message_id=4001)
        message = client.receive()
        if message.id == 4000:
            assert message.flags & vu.FLAG_ERROR
            message = client.receive()
        assert message.id == message_id and message.errno == 0
    except (ConnectionError, BrokenPipeError):
        return


# --- DMA


def test_dma_map_and_unmap(client: VfioUserClient, ram: GuestRam) -> None:
    for _ in range(50):
        client.dma_map(ADDRESS, 1 << 20, ram.fd, offset=ram.GUARD)
        client.dma_unmap(ADDRESS, 1 << 20)


def test_dma_map_without_a_descriptor(client: VfioUserClient) -> None:
    """QEMU maps ROMs and other devices' BARs so."""
    client.dma_map(ADDRESS, 4096, None)
    client.dma_unmap(ADDRESS, 4096)


def test_bad_dma_maps(client: VfioUserClient, ram: GuestRam) -> None:
    def status(size_field: int, flags: int, offset: int, iova: int, size: int) -> int:
        return error_of(client, vu.DMA_MAP, vu.DMA_MAP_BODY.pack(size_field, flags, offset, iova, size), [ram.fd])

    assert status(8, 3, 0, ADDRESS, 4096) == errno.EINVAL, "argsz"
    assert status(32, 0xF0, 0, ADDRESS, 4096) == errno.EINVAL, "flags"
    assert status(32, 3, 0, ADDRESS, 0) == errno.EINVAL, "size 0"
    assert status(32, 3, 0, 2**64 - 4096, 8192) == errno.EINVAL, "beyond the address space"
    assert status(32, 3, 2**64 - 4096, ADDRESS, 8192) == errno.EINVAL, "beyond every file"
    assert status(32, 3, 0, ADDRESS, ram.total + 4096) != 0, "longer than the file: touching it would be SIGBUS"
    assert status(32, 3, ram.total, ADDRESS, 4096) != 0, "behind the end of the file"
    assert client.alive()


def test_overlapping_dma_maps(client: VfioUserClient, ram: GuestRam) -> None:
    client.dma_map(ADDRESS, 0x10000, ram.fd, offset=ram.GUARD)
    for iova, size in ((ADDRESS + 0x1000, 0x1000), (ADDRESS - 0x1000, 0x2000), (0, 1 << 30), (ADDRESS, 0x1000)):
        body = vu.DMA_MAP_BODY.pack(32, 3, 0, iova, size)
        assert error_of(client, vu.DMA_MAP, body, None) in (errno.EEXIST, errno.EINVAL), f"{iova:#x} {size:#x}"
    elsewhere = vu.DMA_MAP_BODY.pack(32, 3, ram.GUARD + 0x1000, ADDRESS, 0x10000)
    assert error_of(client, vu.DMA_MAP, elsewhere, [ram.fd]) in (errno.EEXIST, errno.EINVAL), "other memory behind it"
    client.dma_map(ADDRESS + 0x10000, 0x1000, ram.fd, offset=ram.GUARD)
    client.dma_unmap(ADDRESS, 0x10000)


def test_bad_dma_unmaps(client: VfioUserClient, ram: GuestRam) -> None:
    client.dma_map(ADDRESS, 0x10000, ram.fd, offset=ram.GUARD)
    unknown = vu.DMA_UNMAP_BODY.pack(24, 0, 0x77770000, 4096)
    assert error_of(client, vu.DMA_UNMAP, unknown) in (0, errno.ENOENT, errno.EINVAL)
    part = vu.DMA_UNMAP_BODY.pack(24, 0, ADDRESS + 0x1000, 0x1000)
    assert error_of(client, vu.DMA_UNMAP, part) in (errno.ENOENT, errno.EINVAL, errno.ENOTSUP)
    assert error_of(client, vu.DMA_UNMAP, vu.DMA_UNMAP_BODY.pack(24, 0, 2**64 - 4096, 8192)) == errno.EINVAL
    assert error_of(client, vu.DMA_UNMAP, vu.DMA_UNMAP_BODY.pack(24, 0xF0, ADDRESS, 0x10000)) == errno.EINVAL
    client.dma_unmap(ADDRESS, 0x10000)


def test_dma_unmap_all(client: VfioUserClient, ram: GuestRam) -> None:
    for n in range(4):
        client.dma_map(ADDRESS + n * 0x20000, 0x10000, ram.fd, offset=ram.GUARD)
    client.request(vu.DMA_UNMAP, vu.DMA_UNMAP_BODY.pack(24, 2, 0, 0))
    for n in range(4):
        client.dma_map(ADDRESS + n * 0x20000, 0x10000, ram.fd, offset=ram.GUARD)


def test_hundreds_of_dma_maps(client: VfioUserClient, ram: GuestRam) -> None:
    """A guest with fragmented memory; descriptors in the daemon must not grow with them."""
    for n in range(600):
        client.dma_map(ADDRESS + n * 0x2000, 0x1000, ram.fd, offset=ram.GUARD + n % 256 * 0x1000)
    for n in range(600):
        client.dma_unmap(ADDRESS + n * 0x2000, 0x1000)


def test_too_many_descriptors(client: VfioUserClient, ram: GuestRam) -> None:
    body = vu.DMA_MAP_BODY.pack(32, 3, 0, ADDRESS, 4096)
    for count in (2, 16, 200):
        try:
            assert error_of(client, vu.DMA_MAP, body, [ram.fd] * count) == errno.EINVAL
        except ConnectionError:
            return
    client.dma_map(ADDRESS, 4096, ram.fd)


# --- interrupts


def test_set_irqs(client: VfioUserClient) -> None:
    fds = [os.eventfd(0) for _ in range(4)]
    try:
        client.set_irqs(vu.MSIX_INDEX, 0, fds)
        client.set_irqs(vu.MSIX_INDEX, 61, fds)
        unassign = vu.SET_IRQS_BODY.pack(20, 0x24, vu.MSIX_INDEX, 1, 2)
        assert error_of(client, vu.SET_IRQS, unassign) == 0
        client.disable_irqs(vu.MSIX_INDEX)
        client.set_irqs(3, 0, fds[:1])
    finally:
        for fd in fds:
            os.close(fd)


def test_bad_set_irqs(client: VfioUserClient) -> None:
    count = client.irq_info(vu.MSIX_INDEX)[1]
    fd = os.eventfd(0)
    pack = vu.SET_IRQS_BODY.pack
    try:
        for name, body, fds in (
            ("argsz", pack(8, 0x24, 2, 0, 1), [fd]),
            ("index", pack(20, 0x24, 5, 0, 1), [fd]),
            ("index", pack(20, 0x24, 0xFFFFFFFF, 0, 1), [fd]),
            ("start", pack(20, 0x24, 2, count, 1), [fd]),
            ("overflow", pack(20, 0x24, 2, 0xFFFFFFFF, 2), [fd, fd]),
            ("count", pack(20, 0x24, 2, count - 1, 2), [fd, fd]),
            ("fewer descriptors", pack(20, 0x24, 2, 0, 3), [fd]),
            ("more descriptors", pack(20, 0x24, 2, 0, 1), [fd, fd]),
            ("two data kinds", pack(20, 0x27, 2, 0, 1), [fd]),
            ("two actions", pack(20, 0x3C, 2, 0, 1), [fd]),
            ("no action", pack(20, 0x04, 2, 0, 1), [fd]),
        ):
            assert error_of(client, vu.SET_IRQS, body, fds) == errno.EINVAL, name
    finally:
        os.close(fd)
    assert client.alive()


# --- life of a connection


def test_reset_returns_the_controller_to_its_start(target: Target, daemon: Daemon) -> None:
    ram = GuestRam()
    nvme = Nvme(target.path, ram)
    for _ in range(3):
        nvme.enable()
        assert nvme.identify(1)
        nvme.device_reset()
        assert nvme.read32(0x14) == 0 and nvme.read32(0x24) == 0, "CC and AQA"
    nvme.close()
    ram.check_canaries()
    ram.close()
    assert daemon.alive()


def test_many_connections_one_after_the_other(target: Target, daemon: Daemon) -> None:
    for turn in range(30):
        with VfioUserClient(target.path) as client:
            if turn % 3:
                client.negotiate()
            if turn % 3 == 2:
                assert client.alive()
    assert daemon.alive()


def test_descriptors_do_not_leak(target: Target, daemon: Daemon) -> None:
    """Connections with memory, interrupts and errors, counted in keeper and worker."""

    def cycle() -> None:
        ram = GuestRam(1 << 20)
        nvme = Nvme(target.path, ram)
        nvme.enable()
        nvme.client.dma_map(0x5000_0000, 0x10000, ram.fd, offset=ram.GUARD)
        for command in (vu.DEVICE_GET_INFO, 77):
            with pytest.raises(VfioUserError):
                nvme.client.request(command, bytes(3), fds=[ram.fd])
        nvme.close()
        ram.close()
        with VfioUserClient(target.path) as client:  # served after the earlier one was torn down
            client.negotiate()

    def count() -> int:
        assert daemon.process is not None
        return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in (daemon.process.pid, daemon.worker_pid()))

    for _ in range(3):
        cycle()
    before = count()
    for _ in range(60):
        cycle()
    assert count() <= before + 60, "descriptors left behind"  # less than one for each cycle
