"""Namespace Management, Namespace Attachment, Format NVM and their Identify structures, without a card.

Base 2.0: 5.14, 5.17.2, 5.20, 5.21. What the commands do to a subsystem is in tests/conformance/test_namespaces.py.
"""

from __future__ import annotations

import struct

import pytest

from dpu.nvme.interfaces import Counters, Life
from tests.support.nvme_host import BUFFER, PAGE, Host

MANAGE, ATTACHMENT, FORMAT = 0x0D, 0x15, 0x80
INVALID_FIELD, INVALID_NAMESPACE = 0x002, 0x00B
INVALID_FORMAT, NO_THIN, LIST_INVALID = 0x10A, 0x11B, 0x11C


def create(host: Host, *, nsze: int = 99, ncap: int | None = None, flbas: int = 0, at: dict[int, int] | None = None):
    data = bytearray(PAGE)
    struct.pack_into("<QQ", data, 0, nsze, nsze if ncap is None else ncap)
    data[26] = flbas
    for offset, value in (at or {}).items():
        data[offset] = value
    host.memory.data[BUFFER : BUFFER + PAGE] = data
    result = host.submit(MANAGE)
    assert result is not None
    return result


def test_create() -> None:
    host = Host()
    result = create(host, flbas=1, at={30: 1})
    assert (result.code, result.dw0) == (0, 7), "DW0 is the NSID"
    assert create(host, nsze=5).code == 0
    assert host.subsystem.calls == [("create", 99, 4096, False), ("create", 5, 512, True)]


@pytest.mark.parametrize(
    ("wanted", "status"),
    [
        ({"flbas": 2}, INVALID_FORMAT),
        ({"flbas": 1 << 5}, INVALID_FORMAT),
        ({"flbas": 1 << 4}, INVALID_FORMAT),
        ({"at": {29: 1}}, INVALID_FORMAT),  # DPS
        ({"ncap": 98}, NO_THIN),
        ({"nsze": 0}, INVALID_FIELD),
        ({"at": {30: 2}}, INVALID_FIELD),  # NMIC: what it does not know
        ({"at": {92: 1}}, INVALID_FIELD),  # ANAGRPID
        ({"at": {100: 1}}, INVALID_FIELD),  # NVMSETID
    ],
)
def test_create_is_checked(wanted: dict[str, int], status: int) -> None:
    host = Host()
    assert create(host, **wanted).code == status  # type: ignore[arg-type]
    assert host.subsystem.calls == []


@pytest.mark.parametrize(
    ("nsid", "cdw", "status"),
    [(1, {10: 0}, INVALID_FIELD), (0, {10: 2}, INVALID_FIELD), (0, {10: 0, 11: 2 << 24}, INVALID_FIELD)],
)
def test_management_fields(nsid: int, cdw: dict[int, int], status: int) -> None:
    assert Host().code(MANAGE, nsid=nsid, cdw=cdw) == status


def test_delete() -> None:
    host = Host()
    assert host.code(MANAGE, nsid=3, cdw={10: 1}) == 0
    assert host.code(MANAGE, nsid=0xFFFFFFFF, cdw={10: 1}) == 0
    assert host.subsystem.calls == [("delete", 3), ("delete", 1, 3)]
    assert host.code(MANAGE, nsid=9, cdw={10: 1}) == INVALID_NAMESPACE  # above NN


@pytest.mark.parametrize("select", [0, 1])
def test_attachment(select: int) -> None:
    host = Host()
    host.memory.data[BUFFER : BUFFER + 8] = struct.pack("<4H", 2, 5, 6, 7)
    assert host.code(ATTACHMENT, nsid=3, cdw={10: select}) == 0
    assert host.subsystem.calls == [("detach" if select else "attach", 3, 5, 6)]


@pytest.mark.parametrize("words", [[0], [2, 6, 5], [2, 5, 5], [2048, *range(1, 2048)]])
def test_controller_lists(words: list[int]) -> None:
    host = Host()
    host.memory.data[BUFFER : BUFFER + PAGE] = struct.pack(f"<{len(words)}H", *words).ljust(PAGE, b"\0")
    assert host.code(ATTACHMENT, nsid=3) == LIST_INVALID
    assert host.subsystem.calls == []


def test_format() -> None:
    host = Host()
    assert host.code(FORMAT, nsid=3, cdw={10: 0}) == 0
    assert host.code(FORMAT, nsid=3, cdw={10: 1 | 1 << 9}) == 0
    assert host.subsystem.calls == [("format", 3, 512), ("format", 3, 4096)]
    assert host.code(FORMAT, nsid=3, cdw={10: 1 << 12}) == INVALID_FORMAT  # LBAFU


def test_allocated_namespaces_and_controllers() -> None:
    host = Host()
    host.subsystem.detached.add(3)
    host.subsystem.controllers = [2, 5, 9]
    assert host.identify(0x02) == struct.pack("<I", 1).ljust(PAGE, b"\0")
    assert host.identify(0x10) == struct.pack("<2I", 1, 3).ljust(PAGE, b"\0")
    assert host.identify(0x10, nsid=1) == struct.pack("<I", 3).ljust(PAGE, b"\0")
    assert host.identify(0x00, nsid=3) == bytes(PAGE)
    assert host.identify(0x11, nsid=3)[:8] == struct.pack("<Q", 77)
    assert host.identify(0x11, nsid=2) == bytes(PAGE)
    assert host.identify(0x12, nsid=1) == struct.pack("<4H", 3, 2, 5, 9).ljust(PAGE, b"\0")
    assert host.identify(0x12, nsid=3) == bytes(PAGE)
    assert host.identify(0x13, cntid=3) == struct.pack("<3H", 2, 5, 9).ljust(PAGE, b"\0")
    assert host.code(0x06, nsid=2, cdw={10: 0x12}) == INVALID_FIELD
    assert host.identify(0x01)[76] == 0b10  # CMIC


def test_smart_goes_on_over_connections() -> None:
    host = Host(enable=False)
    host.subsystem.lived = Life(4, 7_200_000_000_000, 2, 11, {1: Counters(1, 2, 512_000, 1_024_000, 3)})
    host.plane.counts = {1: Counters(10, 20, 512_000, 0, 1), 0xFFFFFFFF: Counters(10, 20, 512_000, 0, 1)}
    host.controller = host.new_controller()
    host.enable()
    page = host.log(2, 512)

    def word(offset: int) -> int:
        return int.from_bytes(page[offset : offset + 16], "little")

    assert [word(at) for at in range(32, 96, 16)] == [2, 2, 11, 22]  # data units and commands
    assert (word(112), word(128), word(144), word(160), word(176)) == (5, 2, 2, 4, 11)
    assert host.code(0x3F) == 0x001
    assert host.log(1, 64)[:8] == struct.pack("<Q", 12), "errors are numbered on"
    ended = host.controller.life()
    assert (ended.power_cycles, ended.unsafe_shutdowns, ended.errors) == (5, 3, 12)
    assert ended.of(1) == Counters(11, 22, 1_024_000, 1_024_000, 4)
    host.write32(0x14, 0x00460001 | 1 << 14)  # CC.SHN
    assert host.controller.life().unsafe_shutdowns == 2
