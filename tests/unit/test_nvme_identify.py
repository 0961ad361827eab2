"""Identify data by byte offset (NVMe Base 2.0 figures 275-280, NVM Command Set 1.0 figure 97)."""

from __future__ import annotations

import struct

import pytest

from tests.support.nvme_host import BUFFER, PAGE, UNMAPPED, Host

INVALID_FIELD, INVALID_NAMESPACE = 0x002, 0x00B


def u16(data: bytes, offset: int) -> int:
    return int.from_bytes(data[offset : offset + 2], "little")


def u32(data: bytes, offset: int) -> int:
    return int.from_bytes(data[offset : offset + 4], "little")


def u64(data: bytes, offset: int) -> int:
    return int.from_bytes(data[offset : offset + 8], "little")


def test_identify_controller() -> None:
    data = Host().identify(0x01)
    assert u16(data, 0) == 0x1DE5  # VID
    assert u16(data, 2) == 0x1DE5  # SSVID
    assert data[4:24] == b"SER-1".ljust(20)
    assert data[24:64] == b"Unit test model".ljust(40)
    assert data[64:72] == b"1.0".ljust(8)
    assert data[72] == 0  # RAB
    assert data[73:76] == bytes([0, 0, 2])  # IEEE
    assert data[76] == 0  # CMIC
    assert data[77] == 6  # MDTS
    assert u16(data, 78) == 5  # CNTLID
    assert u32(data, 80) == 0x00020000  # VER
    assert u32(data, 92) == 1 << 8 | 1 << 13  # OAES: namespace attribute and LBA status information notices
    assert u32(data, 96) == 0  # CTRATT
    assert data[111] == 1  # CNTRLTYPE: I/O controller
    # OACS: Format NVM, Namespace Management, Doorbell Buffer Config, Get LBA Status
    assert u16(data, 256) == 1 << 1 | 1 << 3 | 1 << 8 | 1 << 9
    assert data[258] == 3  # ACL
    assert data[259] == 3  # AERL
    assert data[260] == 0b0011  # FRMW: one slot, read-only
    assert data[261] == 0b100111  # LPA
    assert data[262] == 63  # ELPE
    assert data[263] == 0  # NPSS
    assert data[264] == 1  # AVSCC
    assert (u16(data, 266), u16(data, 268)) == (343, 353)  # WCTEMP, CCTEMP
    assert u16(data, 320) == 0  # KAS: no Keep Alive, which is optional on PCIe
    assert data[512] == 0x66  # SQES
    assert data[513] == 0x44  # CQES
    assert u16(data, 514) == 1024  # MAXCMD
    assert u32(data, 516) == 8  # NN
    # ONCS: Compare, Write Uncorrectable, DSM, Write Zeroes, Save/Select, Timestamp, Verify, Copy; no Reservations
    assert u16(data, 520) == 0b1_1101_1111
    assert u16(data, 522) == 0  # FUSES
    assert data[280:296] == (1 << 70).to_bytes(16, "little")  # TNVMCAP
    assert data[296:312] == (1 << 69).to_bytes(16, "little")  # UNVMCAP
    assert data[524] == 1 << 3  # FNA: Format NVM of one namespace at a time
    assert data[525] == 0b111  # VWC: present, Flush of FFFFFFFFh supported
    assert (u16(data, 526), u16(data, 528)) == (0, 0)  # AWUN, AWUPF: one block
    assert u16(data, 534) == 1  # OCFS: Copy Descriptor Format 0h
    assert u32(data, 536) == 0  # SGLS
    assert data[768:1024] == b"nqn.2026-01.org.example:unit".ljust(256, b"\0")
    assert data[2048:2080] == bytes(32)  # PSD0
    assert data[3072:] == bytes(1024)


def test_identify_namespace() -> None:
    host = Host()
    data = host.identify(0x00, nsid=1)
    assert (u64(data, 0), u64(data, 8), u64(data, 16)) == (0x12345678,) * 3  # NSZE, NCAP, NUSE
    assert data[24] == 0b10  # NSFEAT: NAWUN and NAWUPF are the namespace's own
    assert (data[25], data[26]) == (1, 0)  # NLBAF (0's based), FLBAS
    assert data[30] == 0  # NMIC: private, for there is no other controller
    assert data[48:64] == (0x12345678 * 512).to_bytes(16, "little")  # NVMCAP
    assert data[33] == 1  # DLFEAT: deallocated blocks read zeroes
    # NAWUN, NAWUPF, NACWU, NABSN, NABO, NABSPF: 256 KiB, 0's based, without boundaries
    assert [u16(data, at) for at in range(34, 46, 2)] == [511, 511, 0, 0, 0, 0]
    assert (u16(data, 74), u32(data, 76), data[80]) == (512, 2048, 127)  # MSSRL, MCL, MSRC (0's based)
    assert data[99] == 0  # NSATTR
    assert data[104:120] == bytes(range(1, 17))  # NGUID
    assert data[120:128] == bytes(range(0x21, 0x29))  # EUI64
    assert (u32(data, 128), u32(data, 132)) == (9 << 16, 12 << 16)  # LBAF0, 1: 512 and 4096 bytes, no metadata
    assert data[136:] == bytes(PAGE - 136)

    data = host.identify(0x00, nsid=3)
    assert u64(data, 0) == 77
    assert (data[24], data[33]) == (0, 0)
    assert (u16(data, 34), u16(data, 36)) == (0, 0)  # as the controller's AWUN, AWUPF: one block
    assert (u16(data, 74), u32(data, 76)) == (64, 256)
    assert data[99] == 1  # write protected
    assert data[26] == 1
    common = host.identify(0x00, nsid=0xFFFFFFFF)  # with Namespace Management: what all have in common
    assert (common[25], common[128:136]) == (1, data[128:136]) and not any(common[:25])


@pytest.mark.parametrize("cns", [0x00, 0x05, 0x08])
def test_inactive_namespace_is_all_zeroes(cns: int) -> None:
    assert Host().identify(cns, nsid=2) == bytes(PAGE)


@pytest.mark.parametrize("cns", [0x00, 0x03, 0x05, 0x08])
@pytest.mark.parametrize("nsid", [0, 9, 0xFFFFFFFE, 0xFFFFFFFF])
def test_invalid_nsid(cns: int, nsid: int) -> None:
    if (cns, nsid) == (0x00, 0xFFFFFFFF):
        return  # see test_identify_namespace
    assert Host().code(0x06, nsid=nsid, cdw={10: cns}) == INVALID_NAMESPACE


@pytest.mark.parametrize("cns", [0x01, 0x06, 0x1C])
def test_nsid_where_it_is_not_used(cns: int) -> None:
    assert Host().code(0x06, nsid=1, cdw={10: cns | 0xFFFF << 16}) == INVALID_FIELD


@pytest.mark.parametrize("cns", [0x02, 0x07])
def test_active_namespace_list(cns: int) -> None:
    host = Host()
    assert host.identify(cns, nsid=0) == struct.pack("<II", 1, 3).ljust(PAGE, b"\0")
    assert host.identify(cns, nsid=1) == struct.pack("<I", 3).ljust(PAGE, b"\0")
    assert host.identify(cns, nsid=3) == bytes(PAGE)
    assert host.identify(cns, nsid=0xFFFFFFFD) == bytes(PAGE)
    for nsid in (0xFFFFFFFE, 0xFFFFFFFF):
        assert host.code(0x06, nsid=nsid, cdw={10: cns}) == INVALID_NAMESPACE


def test_namespace_descriptors() -> None:
    host = Host()
    data = host.identify(0x03, nsid=1)
    expected = bytes([1, 8, 0, 0]) + bytes(range(0x21, 0x29))
    expected += bytes([2, 16, 0, 0]) + bytes(range(1, 17))
    expected += bytes([3, 16, 0, 0]) + bytes(range(0x41, 0x51))
    expected += bytes([4, 1, 0, 0, 0])
    assert data == expected.ljust(PAGE, b"\0")
    # Identifiers that a namespace does not have are left out.
    data = host.identify(0x03, nsid=3)
    assert data.startswith(bytes([3, 16, 0, 0]) + bytes(range(0x61, 0x71)) + bytes([4, 1, 0, 0, 0]))
    # Inactive: nothing to describe.
    assert host.code(0x06, nsid=2, cdw={10: 3}) == INVALID_NAMESPACE


def test_command_set_structures() -> None:
    host = Host()
    assert host.identify(0x05, nsid=1) == bytes(PAGE)
    assert host.identify(0x06) == bytes(PAGE)
    assert host.identify(0x08, nsid=1)[14] == 1  # NSTAT.NRDY
    assert host.identify(0x08, nsid=3)[8] == 1  # NSATTR: write protected
    assert host.identify(0x1C, cntid=0xFFFF) == struct.pack("<Q", 1).ljust(PAGE, b"\0")
    assert host.identify(0x1C, cntid=5) == struct.pack("<Q", 1).ljust(PAGE, b"\0")
    assert host.code(0x06, cdw={10: 0x1C | 6 << 16}) == INVALID_FIELD
    for cns, nsid in ((0x05, 1), (0x06, 0), (0x07, 0)):
        assert host.code(0x06, nsid=nsid, cdw={10: cns, 11: 2 << 24}) == INVALID_FIELD


@pytest.mark.parametrize("cns", [0x04, 0x09, 0x14, 0x15, 0x16, 0x17, 0x18, 0x19, 0xFF])
def test_other_cns_values(cns: int) -> None:
    assert Host().code(0x06, cdw={10: cns}) == INVALID_FIELD


def test_data_over_two_pages_and_the_errors_of_prps() -> None:
    host = Host()
    whole = host.identify(0x01)
    host.memory.data[BUFFER : BUFFER + 4 * PAGE] = b"\xee" * (4 * PAGE)
    assert host.code(0x06, prp1=BUFFER + 0xE00, prp2=BUFFER + 3 * PAGE, cdw={10: 1}) == 0
    assert host.memory.read(BUFFER + 0xE00, 0x200) == whole[:0x200]
    assert host.memory.read(BUFFER + 3 * PAGE, PAGE - 0x200) == whole[0x200:]
    assert host.memory.read(BUFFER + PAGE, PAGE) == b"\xee" * PAGE
    assert host.memory.read(BUFFER + 4 * PAGE - 0x200, 0x200) == b"\xee" * 0x200

    assert host.code(0x06, prp1=BUFFER + 2, prp2=0, cdw={10: 1}) == 0x013  # PRP1 is no dword address
    assert host.code(0x06, prp1=BUFFER + 4, prp2=BUFFER + PAGE + 8, cdw={10: 1}) == 0x013
    result = host.submit(0x06, prp1=UNMAPPED, cdw={10: 1})
    assert result is not None
    assert (result.code, result.dnr) == (0x004, False)
    assert host.code(0x06, prp1=BUFFER + 4, prp2=UNMAPPED, cdw={10: 1}) == 0x004
    assert host.code(0x06, prp1=0xFFFFFFFFFFFFF000, prp2=0, cdw={10: 1}) == 0x004
