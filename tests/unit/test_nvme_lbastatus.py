"""Get LBA Status and the LBA Status Information log by byte offset (NVM Command Set 1.0, 4.2.1, 4.1.4.5, 5.8)."""

from __future__ import annotations

import struct

import pytest

from tests.support.nvme_host import BUFFER, CC_ENABLE, UNMAPPED, Host

INVALID_FIELD, INVALID_NAMESPACE, LBA_OUT_OF_RANGE, DATA_TRANSFER = 0x002, 0x00B, 0x080, 0x004
SCAN, TRACKED = 0x10, 0x11
MORE, ALL = 1, 2
ALERT = 0x0E0502  # DW0: notice, LBA Status Information Alert, log page 0Eh


def status(host: Host, slba: int, length: int, *, nsid: int = 1, action: int = TRACKED, dwords: int = 64) -> int:
    cdw = {10: slba & 0xFFFFFFFF, 11: slba >> 32, 12: dwords - 1, 13: length | action << 24}
    return host.code(0x86, nsid=nsid, cdw=cdw)


def found(host: Host, count: int) -> list[tuple[int, int, int]]:
    """(block, blocks, status) of the descriptors in the buffer."""
    raw = host.buffer(8 + 16 * count)
    assert raw[5:8] == bytes(3)
    assert struct.unpack_from("<I", raw)[0] == count
    entries = [struct.unpack_from("<QIBBH", raw, 8 + 16 * i) for i in range(count)]
    assert all(entry[2] == entry[4] == 0 for entry in entries)
    return [(entry[0], entry[1] + 1, entry[3]) for entry in entries]  # NLB is 0's based


@pytest.mark.parametrize("action", [SCAN, TRACKED])
def test_descriptors(action: int) -> None:
    host = Host()
    host.plane.bad[1] = {0, 1, 2, 100, 0x12345677}
    assert status(host, 0, 0, action=action) == 0
    assert found(host, 3) == [(0, 3, 3), (100, 1, 3), (0x12345677, 1, 3)]
    assert host.buffer(5)[4] == ALL
    assert status(host, 1, 99, action=action) == 0
    assert found(host, 1) == [(1, 2, 3)]
    assert status(host, 1, 100, action=action) == 0
    assert found(host, 2) == [(1, 2, 3), (100, 1, 3)]
    assert status(host, 3, 5, action=action) == 0
    assert found(host, 0) == [] and host.buffer(5)[4] == ALL


def test_no_more_than_the_host_has_room_for() -> None:
    host = Host()
    host.plane.bad[1] = {10, 20, 30}
    for dwords, count in ((2, 0), (5, 0), (6, 1), (9, 1), (10, 2), (13, 2), (14, 3), (1 << 32, 3)):
        host.memory.write(BUFFER, b"\xee" * 128)
        assert status(host, 0, 0, dwords=dwords) == 0
        assert len(found(host, count)) == count
        assert host.buffer(5)[4] == (ALL if count == 3 else MORE)
        assert host.buffer(128)[8 + 16 * count :] == b"\xee" * (120 - 16 * count)
    host.memory.write(BUFFER, b"\xee" * 8)
    assert status(host, 0, 0, dwords=1) == 0
    assert host.buffer(8) == bytes(4) + b"\xee" * 4


def test_errors() -> None:
    host = Host()
    size = 0x12345678
    for action in (0, 1, 2, 0x0F, 0x12, 0xFF):
        assert status(host, 0, 0, action=action) == INVALID_FIELD
    for slba, length in ((size, 0), (size, 1), (size - 1, 2), (1 << 63, 0), ((1 << 64) - 1, 0)):
        assert status(host, slba, length) == LBA_OUT_OF_RANGE
    assert status(host, size - 1, 1) == status(host, size - 1, 0) == 0
    assert status(host, 0, 0, nsid=2) == INVALID_FIELD  # inactive
    for nsid in (0, 9, 0xFFFFFFFF):
        assert status(host, 0, 0, nsid=nsid) == INVALID_NAMESPACE
    assert host.code(0x86, nsid=1, prp1=UNMAPPED, cdw={13: TRACKED << 24}) == DATA_TRANSFER


def header(log: bytes) -> tuple[int, int, int, int]:
    """LSLPLEN, NLSLNE, ESTULB, LSGC."""
    return struct.unpack_from("<III2xH", log)


def test_log_names_ranges_of_namespaces() -> None:
    host = Host()
    assert header(host.log(0x0E, 16)) == (16, 0, 0, 0)
    host.plane.bad = {1: {5, 6, 90}, 3: {76}}
    log = host.log(0x0E, 4096)
    assert header(log) == (16 + 16 + 32 + 16 + 16, 2, 4, 1)
    assert struct.unpack_from("<IIB7x", log, 16) == (1, 2, TRACKED)
    assert [struct.unpack_from("<QI4x", log, at) for at in (32, 48)] == [(5, 1), (90, 0)]  # 0's based
    assert struct.unpack_from("<IIB7x", log, 64) == (3, 1, TRACKED)
    assert struct.unpack_from("<QI4x", log, 80) == (76, 0)


def test_log_stays_as_it_is_while_the_host_reads_it() -> None:
    """From the first read with RAE 1 to one with RAE 0, over a worker's death too; then the generation tells."""
    host = Host()
    host.plane.bad = {1: {5}}
    first = host.log(0x0E, 4096, rae=True)
    host.plane.bad = {1: {5, 7}}
    assert host.log(0x0E, 4096, rae=True) == first
    bad = host.plane.bad
    host.next_worker()
    host.plane.bad = bad
    assert host.log(0x0E, 4096) == first and header(first)[3] == 1
    assert header(host.log(0x0E, 4096))[1:] == (1, 2, 2)
    host.plane.bad = {1: {7}}
    assert header(host.log(0x0E, 4096))[1:] == (1, 1, 2), "nothing that was not told"
    host.next_worker()
    host.plane.bad = {1: {7, 8}}
    assert header(host.log(0x0E, 4096))[1:] == (1, 2, 3)
    host.log(0x0E, 16, rae=True)
    host.write32(0x14, 0)
    host.write32(0x14, CC_ENABLE)
    host.plane.bad = {}
    assert header(host.log(0x0E, 16)) == (16, 0, 0, 3)


def test_too_many_ranges_to_name() -> None:
    host = Host()
    host.plane.bad = {1: set(range(0, 200, 2)), 3: {1}}
    log = host.log(0x0E, 4096)
    assert header(log)[:2] == (16 + 16 + 32, 2)
    assert struct.unpack_from("<IIB7x", log, 16) == (1, 0xFFFFFFFF, TRACKED)
    assert struct.unpack_from("<IIB7x", log, 32) == (3, 1, TRACKED)


def test_alert() -> None:
    """Only when the host wants it; once until the log was read with RAE 0."""
    host = Host()
    host.controller.unrecoverable_found()
    assert host.submit(0x0C) is None and not host.plane.completed
    assert host.code(0x09, cdw={10: 0x0B, 11: 1 << 13}) == 0
    host.controller.unrecoverable_found()
    assert [one.dw0 for _, one in host.plane.completed] == [ALERT]
    assert host.submit(0x0C) is None
    host.controller.unrecoverable_found()
    host.log(0x0E, 16, rae=True)
    host.controller.unrecoverable_found()
    assert len(host.plane.completed) == 1
    host.log(0x0E, 16)
    host.controller.unrecoverable_found()
    assert [one.dw0 for _, one in host.plane.completed] == [ALERT, ALERT]
