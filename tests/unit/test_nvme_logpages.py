"""Log pages by byte offset (NVMe Base 2.0, 5.16), offsets, lengths and PRP lists."""

from __future__ import annotations

import struct

import pytest

from dpu.nvme.interfaces import Counters
from tests.support.nvme_host import BUFFER, PAGE, UNMAPPED, Host

INVALID_FIELD, INVALID_NAMESPACE, DATA_TRANSFER, PRP_OFFSET, INVALID_LOG = 0x002, 0x00B, 0x004, 0x013, 0x109
PAGES = {0x00: 1024, 0x01: 64 * 64, 0x02: 512, 0x03: 512, 0x04: 4096, 0x05: 4096, 0x12: 1024, 0x13: 4096}
PAGES |= {0x0E: 16}  # without unrecoverable blocks: its header


def u128(data: bytes, offset: int) -> int:
    return int.from_bytes(data[offset : offset + 16], "little")


def test_supported_log_pages() -> None:
    words = struct.unpack("<256I", Host().log(0x00, 1024))
    assert {lid for lid, word in enumerate(words) if word} == set(PAGES)
    assert all(words[lid] == 1 for lid in PAGES)  # LSUPP, no index offsets


@pytest.mark.parametrize("lid", sorted(set(range(256)) - set(PAGES)))
def test_log_pages_that_do_not_exist(lid: int) -> None:
    assert Host().code(0x02, cdw={10: lid | 127 << 16}) == INVALID_LOG


@pytest.mark.parametrize(("lid", "size"), sorted(PAGES.items()))
def test_offsets_and_lengths(lid: int, size: int) -> None:
    host = Host()
    host.code(0x02, cdw={10: 0xFF})  # something for the error log
    host.controller.namespace_changed(3)
    whole = host.log(lid, size, rae=True)
    assert host.log(lid, 4, rae=True) == whole[:4]
    assert host.log(lid, 16, offset=size - 16, rae=True) == whole[-16:]
    assert host.log(lid, 32, offset=size - 16, rae=True) == whole[-16:] + bytes(16)
    assert host.log(lid, 8, offset=size, rae=True) == bytes(8)
    for cdw in ({12: 1}, {12: 2}, {12: size + 4}, {13: 1}, {12: 0xFFFFFFFC, 13: 0xFFFFFFFF}):
        assert host.code(0x02, nsid=0xFFFFFFFF, cdw={10: lid | 3 << 16} | cdw) == INVALID_FIELD


def test_length_is_limited_by_mdts_and_goes_through_prp_lists() -> None:
    host = Host()
    table, target = 0x30000, 0x40000
    numd = 256 * 1024 // 4 - 1
    pages = [target + PAGE * index for index in range(64)]
    struct.pack_into("<63Q", host.memory.data, table, *pages[1:])
    host.memory.data[target : target + 64 * PAGE] = b"\xee" * (64 * PAGE)
    cdw = {10: 0x05 | (numd & 0xFFFF) << 16, 11: numd >> 16}
    assert host.code(0x02, prp1=target, prp2=table, cdw=cdw) == 0
    assert host.memory.read(target + PAGE, 63 * PAGE) == bytes(63 * PAGE)  # the page has 4 KiB
    assert host.memory.data[target] == 1

    for numd in (256 * 1024 // 4, 0xFFFFFFFF):
        cdw = {10: 0x05 | (numd & 0xFFFF) << 16, 11: numd >> 16}
        assert host.code(0x02, prp1=target, prp2=table, cdw=cdw) == INVALID_FIELD


def _three_pages(host: Host, prp2: int) -> int:
    return host.code(0x02, prp1=BUFFER, prp2=prp2, cdw={10: 0x05 | (3 * 1024 - 1) << 16})


def test_prp_list_rules() -> None:
    host = Host()
    table, chained = 0x30000, 0x31000
    data = host.memory.data
    struct.pack_into("<2Q", data, table + 0x80, BUFFER + PAGE, BUFFER + 2 * PAGE)
    assert _three_pages(host, table + 0x80) == 0  # the list may start anywhere in a page
    assert _three_pages(host, table + 0x84) == PRP_OFFSET
    assert _three_pages(host, UNMAPPED) == DATA_TRANSFER
    # The last entry of a list page points to the next list when more is needed.
    struct.pack_into("<Q", data, table + 0xFF8, chained)
    struct.pack_into("<2Q", data, chained, BUFFER + PAGE, BUFFER + 2 * PAGE)
    data[BUFFER + PAGE : BUFFER + 3 * PAGE] = b"\xee" * 2 * PAGE
    assert _three_pages(host, table + 0xFF8) == 0
    assert data[BUFFER + PAGE : BUFFER + 3 * PAGE] == bytes(2 * PAGE)
    assert struct.unpack_from("<2Q", data, chained) == (BUFFER + PAGE, BUFFER + 2 * PAGE), "a list was taken for data"
    struct.pack_into("<Q", data, table + 0xFF8, chained + 8)  # a chained list must start its page
    assert _three_pages(host, table + 0xFF8) == PRP_OFFSET
    struct.pack_into("<Q", data, table + 0xFF8, table + 0xFF8)  # a loop
    assert _three_pages(host, table + 0xFF8) == PRP_OFFSET
    struct.pack_into("<Q", data, table + 0xFF8, UNMAPPED)
    assert _three_pages(host, table + 0xFF8) == DATA_TRANSFER
    struct.pack_into("<2Q", data, table + 0x80, BUFFER + PAGE, BUFFER + 2 * PAGE + 4)
    assert _three_pages(host, table + 0x80) == PRP_OFFSET
    struct.pack_into("<2Q", data, table + 0x80, BUFFER + PAGE, UNMAPPED)
    assert _three_pages(host, table + 0x80) == DATA_TRANSFER
    # All entries of a list page are data when they are just enough.
    struct.pack_into("<2Q", data, table + 0xFF0, BUFFER + PAGE, BUFFER + 2 * PAGE)
    data[BUFFER + 2 * PAGE : BUFFER + 3 * PAGE] = b"\xee" * PAGE
    assert _three_pages(host, table + 0xFF0) == 0
    assert data[BUFFER + 2 * PAGE : BUFFER + 3 * PAGE] == bytes(PAGE)


def test_error_log_holds_the_newest_first() -> None:
    host = Host()
    for number in range(70):
        host.controller.record_error(
            2, 0x100 + number, 0x4281, nsid=1, lba=0x123456789 + number, parameter_error_location=0x0128
        )
    log = host.log(0x01, 64 * 64)
    counts = [int.from_bytes(log[at : at + 8], "little") for at in range(0, 4096, 64)]
    assert counts == list(range(70, 6, -1))
    count, sqid, cid, status, location, lba, nsid = struct.unpack_from("<QHHHHQI", log)
    assert (count, sqid, cid, status >> 1) == (70, 2, 0x100 + 69, 0x4281)
    assert (location, lba, nsid) == (0x0128, 0x123456789 + 69, 1)
    assert log[28:64] == bytes(36)
    assert u128(host.log(0x02, 512), 176) == 70
    host.write32(0x14, 0)
    host.enable()
    assert host.log(0x01, 64)[0] == 70, "a reset keeps the log"


def test_smart_log() -> None:
    host = Host()
    every, first = 0xFFFFFFFF, 1
    host.plane.counts[every] = Counters(
        reads=11, writes=1 << 70, bytes_read=512_001, bytes_written=512_000 * 9, media_errors=4
    )
    host.plane.counts[first] = Counters(reads=5)
    host.clock.advance_ns(3 * 3600 * 10**9 + 1)
    for nsid in (0, every):
        log = host.log(0x02, 512, nsid=nsid)
        assert log[0] == 0
        assert int.from_bytes(log[1:3], "little") == 308
        assert (log[3], log[4], log[5]) == (100, 10, 0)
        assert (u128(log, 32), u128(log, 48)) == (2, 9)  # thousands of 512 bytes, rounded up
        assert (u128(log, 64), u128(log, 80)) == (11, 1 << 70)
        assert (u128(log, 112), u128(log, 128), u128(log, 144)) == (1, 3, 0)
        assert (u128(log, 160), u128(log, 176)) == (4, 0)
        assert log[192:] == bytes(320)
    assert u128(host.log(0x02, 512, nsid=1), 64) == 5
    assert host.code(0x02, nsid=2, cdw={10: 0x02 | 127 << 16}) == INVALID_FIELD
    assert host.code(0x02, nsid=9, cdw={10: 0x02 | 127 << 16}) == INVALID_NAMESPACE


def test_nsid_of_controller_log_pages() -> None:
    host = Host()
    for lid in set(PAGES) - {0x02}:
        assert host.code(0x02, nsid=1, cdw={10: lid | 3 << 16}) == INVALID_FIELD
        assert host.code(0x02, nsid=0, cdw={10: lid | 3 << 16}) == 0


def test_critical_warning_follows_the_thresholds() -> None:
    host = Host()
    for value, warning in ((308, 2), (309, 0), (307 | 1 << 20, 0), (308 | 1 << 20, 2)):
        assert host.code(0x09, cdw={10: 0x04, 11: value}) == 0
        assert host.log(0x02, 512)[0] == warning, hex(value)


def test_firmware_log() -> None:
    log = Host().log(0x03, 512)
    assert log[0] == 1  # AFI: slot 1 is active
    assert log[1:8] == bytes(7)
    assert log[8:16] == b"1.0".ljust(8)
    assert log[16:] == bytes(496)


def test_effects_log() -> None:
    host = Host()
    words = struct.unpack("<512I", host.log(0x05, 4096)[:2048])
    admin = {opcode for opcode in range(256) if words[opcode]}
    assert admin == {0x00, 0x01, 0x02, 0x04, 0x05, 0x06, 0x08, 0x09, 0x0A, 0x0C, 0x0D, 0x15, 0x7C, 0x80, 0x86}
    # CSUPP; of namespace commands NCC and NIC; of Format NVM LBCC, NCC and CSE: nothing else on that namespace
    effects = {0x0D: 0b1101, 0x15: 0b1101, 0x80: 1 << 16 | 0b111}
    assert all(words[opcode] & 0xFFFFF == effects.get(opcode, 1) for opcode in admin)
    # scope: controller; of some a namespace
    assert all(words[opcode] >> 20 == (1 if opcode in (0x0D, 0x15, 0x80, 0x86) else 2) for opcode in admin)
    io = {opcode: words[256 + opcode] & 0xFFFFF for opcode in range(256) if words[256 + opcode]}
    # CSUPP, LBCC
    assert io == {0x00: 1, 0x01: 3, 0x02: 1, 0x04: 3, 0x05: 1, 0x08: 3, 0x09: 3, 0x0C: 1, 0x19: 3}
    assert host.log(0x05, 4096)[2048:] == bytes(2048)
    assert host.code(0x02, cdw={10: 0x05 | 3 << 16, 14: 2 << 24}) == INVALID_FIELD  # CSI: zoned
    assert host.code(0x02, cdw={10: 0x05 | 3 << 16, 14: 1 << 23}) == INVALID_FIELD  # offset type: index


def test_feature_effects_log() -> None:
    words = struct.unpack("<256I", Host().log(0x12, 1024))
    supported = {fid for fid, word in enumerate(words) if word & 1}
    assert supported == {0x01, 0x02, 0x04, 0x05, 0x06, 0x07, 0x08, 0x09, 0x0A, 0x0B, 0x0E, 0x15, 0x19}
    assert all(words[fid] >> 20 == (1 if fid == 0x05 else 2) for fid in supported)


def test_mi_effects_log_is_empty() -> None:
    assert Host().log(0x13, 4096) == bytes(4096)


def test_changed_namespace_list_is_cleared_by_reading_it() -> None:
    host = Host()
    for nsid in (3, 1, 3):
        host.controller.namespace_changed(nsid)
    expected = struct.pack("<II", 1, 3).ljust(4096, b"\0")
    assert host.log(0x04, 4096, rae=True) == expected
    # A transfer that fails loses nothing.
    assert host.code(0x02, prp1=UNMAPPED, cdw={10: 0x04 | 1023 << 16}) == DATA_TRANSFER
    assert host.log(0x04, 4096) == expected
    assert host.log(0x04, 4096) == bytes(4096)


def test_more_changed_namespaces_than_the_list_holds() -> None:
    host = Host()
    for nsid in range(1, 1026):
        host.controller.namespace_changed(nsid)
    assert host.log(0x04, 4096) == struct.pack("<I", 0xFFFFFFFF).ljust(4096, b"\0")
