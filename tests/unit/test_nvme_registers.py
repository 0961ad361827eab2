"""Registers and the controller's states (NVMe Base 2.0, 3.1.3, 3.5-3.7); offsets and bits written by hand."""

from __future__ import annotations

import pytest

from tests.support.nvme_host import ACQ, ASQ, CC_ENABLE, UNMAPPED, Host, run

RDY, CFS, SHST_COMPLETE = 1, 2, 2 << 2


def test_capabilities_and_version() -> None:
    host = Host(enable=False)
    cap = host.read64(0x00)
    assert cap & 0xFFFF == 1023  # MQES, 0's based
    assert cap >> 16 & 1 == 1  # CQR
    assert cap >> 17 & 3 == 0  # AMS: round robin only
    assert cap >> 24 & 0xFF == 30  # TO, 500 ms
    assert cap >> 32 & 0xF == 0  # DSTRD
    assert cap >> 36 & 1 == 0  # NSSRS
    assert cap >> 37 & 1 == 1  # CSS: NVM command set
    assert cap >> 43 & 1 == 0  # CSS: one command set, so nothing is selected by CSI
    assert cap >> 48 & 0xFF == 0  # MPSMIN, MPSMAX: 4 KiB
    assert cap >> 59 & 3 == 1  # CRMS: ready with media
    assert host.read32(0x68) == 30  # CRTO.CRWMT
    assert host.read32(0x08) == 0x00020000
    assert host.read32(0x00) | host.read32(0x04) << 32 == cap


def test_what_is_no_register_reads_as_zero_and_ignores_writes() -> None:
    host = Host(enable=False)
    for offset in (0x18, 0x20, 0x38, 0x3C, 0x40, 0x50, 0x6C, 0xE00, 0xFFC):
        host.write32(offset, 0xFFFFFFFF)
        assert host.read32(offset) == 0
    host.write64(0x00, 0)
    assert host.read64(0x00) != 0
    host.write32(0x1C, 0xFFFFFFFF)
    assert host.read32(0x1C) == 0


@pytest.mark.parametrize(("offset", "size"), [(0x24, 1), (0x24, 2), (0x25, 4), (0x26, 2), (0x24, 3), (0x24, 0)])
def test_accesses_that_the_specification_leaves_undefined_change_nothing(offset: int, size: int) -> None:
    host = Host(enable=False)
    run(host.controller.register_write(offset, b"\xff" * size))
    assert host.read32(0x24) == 0
    assert len(host.controller.register_read(offset, size)) == size


def test_reads_at_the_end_of_the_register_page_have_the_length_asked_for() -> None:
    host = Host()
    assert host.controller.register_read(0xFFC, 8) == bytes(8)
    assert host.controller.register_read(0x5000, 4) == bytes(4)


def test_queue_registers_by_halves_and_whole() -> None:
    host = Host(enable=False)
    host.write32(0x28, 0x55667000)
    host.write32(0x2C, 0x11223344)
    assert host.read64(0x28) == 0x1122334455667000
    host.write64(0x30, 0xAABBCCDD11223000)
    assert (host.read32(0x30), host.read32(0x34)) == (0x11223000, 0xAABBCCDD)
    host.write32(0x34, 0x1)
    assert host.read64(0x30) == 0x111223000
    host.write32(0x24, 0xFFFFFFFF)
    assert host.read32(0x24) == 0x0FFF0FFF


def test_queue_registers_do_not_change_while_enabled() -> None:
    host = Host()
    for offset in (0x24, 0x28, 0x2C, 0x30, 0x34):
        before = host.read32(offset)
        host.write32(offset, ~before & 0xFFFFFFFF)
        assert host.read32(offset) == before


def test_enable_opens_the_admin_queue_and_disable_keeps_its_registers() -> None:
    host = Host(enable=False)
    assert host.read32(0x1C) == 0
    host.enable(aqa=15 << 16 | 7)
    assert host.read32(0x1C) == RDY
    assert host.read32(0x14) == CC_ENABLE
    assert host.plane.cqs == {0: (16, ACQ, 0, True)}
    assert host.plane.sqs == {0: (8, ASQ, 0)}
    host.write32(0x14, CC_ENABLE & ~1)
    assert host.read32(0x1C) == 0
    assert host.plane.cqs == {} and host.plane.sqs == {}
    assert (host.read32(0x24), host.read64(0x28), host.read64(0x30)) == (15 << 16 | 7, ASQ, ACQ)
    host.write32(0x14, CC_ENABLE)
    assert host.read32(0x1C) == RDY


def test_a_reset_lasts_until_the_last_write_to_memory() -> None:
    """Base 3.7.2 and 3.5.1: RDY is 0 when it is over, and the host enables the controller after that."""
    host = Host()
    host.plane.late = True
    host.write32(0x14, CC_ENABLE & ~1)
    assert host.read32(0x1C) == RDY
    host.write32(0x14, CC_ENABLE)
    assert host.read32(0x1C) & CFS and not host.plane.sqs
    host.write32(0x14, CC_ENABLE & ~1)
    host.plane.late = False
    assert host.read32(0x1C) == 0
    host.enable()
    assert host.read32(0x1C) == RDY


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("CSS 1", {"cc": CC_ENABLE | 1 << 4}),
        ("CSS 6, all command sets", {"cc": CC_ENABLE | 6 << 4}),
        ("CSS 7, admin only", {"cc": CC_ENABLE | 7 << 4}),
        ("MPS 8 KiB", {"cc": CC_ENABLE | 1 << 7}),
        ("AMS weighted", {"cc": CC_ENABLE | 1 << 11}),
        ("AMS vendor", {"cc": CC_ENABLE | 7 << 11}),
        ("ASQS 0", {"aqa": 31 << 16}),
        ("ACQS 0", {"aqa": 31}),
        ("ASQ unaligned", {"asq": ASQ + 0x10}),
        ("ACQ unaligned", {"acq": ACQ + 0x800}),
        ("ASQ unmapped", {"asq": UNMAPPED}),
        ("ACQ unmapped", {"acq": UNMAPPED}),
        ("ASQ runs out of RAM", {"asq": 0x100000 - 0x1000, "aqa": 31 << 16 | 64}),
    ],
)
def test_enable_with_bad_registers_sets_cfs_and_a_reset_recovers(name: str, change: dict[str, int]) -> None:
    host = Host(enable=False)
    host.write32(0x24, change.get("aqa", 31 << 16 | 31))
    host.write64(0x28, change.get("asq", ASQ))
    host.write64(0x30, change.get("acq", ACQ))
    host.write32(0x14, change.get("cc", CC_ENABLE))
    assert host.read32(0x1C) == CFS, name
    assert host.controller.fatal_reason
    assert host.code(0x06, cdw={10: 1}) == 0x006
    host.write32(0x14, 0)
    assert host.read32(0x1C) == 0
    host.enable()
    assert host.read32(0x1C) == RDY
    assert host.controller.fatal_reason == ""


def test_css_mps_and_ams_do_not_change_while_enabled() -> None:
    host = Host()
    host.write32(0x14, CC_ENABLE | 7 << 4 | 3 << 7 | 1 << 11)
    assert host.read32(0x14) == CC_ENABLE
    host.write32(0x14, 1 | 7 << 16 | 5 << 20)  # entry sizes may
    assert host.read32(0x14) == 1 | 7 << 16 | 5 << 20


@pytest.mark.parametrize("shn", [1, 2])
def test_shutdown_makes_writes_durable_and_completes(shn: int) -> None:
    host = Host()
    host.write32(0x14, CC_ENABLE | shn << 14)
    assert host.read32(0x1C) == RDY | SHST_COMPLETE
    assert host.plane.flushes == 1
    host.write32(0x14, CC_ENABLE | shn << 14)  # delivered again: nothing more
    assert host.plane.flushes == 1
    host.write32(0x14, CC_ENABLE)
    assert host.read32(0x1C) == RDY | SHST_COMPLETE, "only a reset ends a shutdown"
    host.write32(0x14, 0)
    assert host.read32(0x1C) == 0
    host.write32(0x14, CC_ENABLE)
    assert host.read32(0x1C) == RDY


def test_reserved_shutdown_value_is_no_shutdown() -> None:
    host = Host()
    host.write32(0x14, CC_ENABLE | 3 << 14)
    assert host.read32(0x1C) == RDY
    assert host.plane.flushes == 0


def test_disable_with_shutdown_in_one_write() -> None:
    host = Host()
    host.write32(0x14, 1 << 14)
    assert host.read32(0x1C) == SHST_COMPLETE
    assert host.plane.sqs == {}
    host.write32(0x14, CC_ENABLE)
    assert host.read32(0x1C) == RDY


def test_fatal_sets_cfs_until_reset() -> None:
    host = Host()
    host.controller.fatal("the plane lost its mind")
    assert host.read32(0x1C) == RDY | CFS
    host.controller.fatal("again")
    assert host.controller.fatal_reason == "the plane lost its mind"
    host.write32(0x14, CC_ENABLE & ~1)
    host.write32(0x14, CC_ENABLE)
    assert host.read32(0x1C) == RDY


def test_interrupt_mask_sets_clears_and_reads_back() -> None:
    host = Host()
    host.write32(0x0C, 0b1011)
    assert host.read32(0x0C) == host.read32(0x10) == host.plane.mask == 0b1011
    host.write32(0x0C, 0b0100)
    host.write32(0x10, 0b0011)
    assert host.read32(0x0C) == host.plane.mask == 0b1100
    host.write32(0x14, 0)
    assert host.read32(0x0C) == 0


def test_device_reset_clears_the_queue_registers_too() -> None:
    host = Host()
    assert host.create_cq(1) == 0
    run(host.controller.reset())
    assert (host.read32(0x14), host.read32(0x1C), host.read32(0x24)) == (0, 0, 0)
    assert (host.read64(0x28), host.read64(0x30)) == (0, 0)
    assert host.plane.cqs == {}
    host.enable()
    assert host.read32(0x1C) == RDY


def test_commands_of_a_disabled_controller_are_internal_errors() -> None:
    host = Host(enable=False)
    assert host.code(0x06, cdw={10: 1}) == 0x006
