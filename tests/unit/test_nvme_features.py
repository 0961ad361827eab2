"""Features (NVMe Base 2.0, 5.15 and 5.27): values, selects, scopes, refusals."""

from __future__ import annotations

import pytest

from tests.support.nvme_host import BUFFER, CC_ENABLE, UNMAPPED, Host

INVALID_FIELD, INVALID_NAMESPACE, SEQUENCE = 0x002, 0x00B, 0x00C
NOT_SAVEABLE, NOT_CHANGEABLE, NOT_NAMESPACE, SET_REJECTED = 0x10D, 0x10E, 0x10F, 0x12B
CURRENT, DEFAULT, SAVED, SUPPORTED = range(4)

# Feature -> value after reset (CDW11 of Get, DW0).
DEFAULTS = {
    0x01: (0, 7),
    0x02: (0, 0),
    0x04: (0, 343),
    0x05: (0, 0),
    0x06: (0, 1),
    0x07: (0, 63 << 16 | 63),
    0x08: (0, 0),
    0x09: (3, 3),
    0x0A: (0, 0),
    0x0B: (0, 0),
    0x0E: (0, 0),
    0x15: (0, 0),
    0x19: (0, 0),
}
CHANGEABLE = {0x02, 0x04, 0x06, 0x07, 0x09, 0x0A, 0x0B, 0x0E, 0x19}


def get(host: Host, fid: int, select: int = CURRENT, cdw11: int = 0, nsid: int = 0) -> tuple[int, int]:
    result = host.submit(0x0A, nsid=nsid, cdw={10: fid | select << 8, 11: cdw11})
    assert result is not None
    return result.code, result.dw0


def put(host: Host, fid: int, value: int, nsid: int = 0, save: bool = False) -> int:
    return host.code(0x09, nsid=nsid, cdw={10: fid | save << 31, 11: value})


@pytest.mark.parametrize("fid", sorted(DEFAULTS))
def test_defaults_and_capabilities(fid: int) -> None:
    host = Host()
    cdw11, default = DEFAULTS[fid]
    nsid = 1 if fid == 0x05 else 0
    for select in (CURRENT, DEFAULT, SAVED):
        assert get(host, fid, select, cdw11, nsid) == (0, default)
    changeable = 4 if fid in CHANGEABLE else 0
    namespace = 2 if fid == 0x05 else 0
    assert get(host, fid, SUPPORTED, cdw11, nsid) == (0, changeable | namespace)
    for select in (4, 5, 6, 7):
        assert get(host, fid, select, cdw11, nsid)[0] == INVALID_FIELD
    assert put(host, fid, 0, nsid, save=True) == NOT_SAVEABLE


@pytest.mark.parametrize("fid", sorted(set(range(256)) - set(DEFAULTS)))
def test_features_that_do_not_exist(fid: int) -> None:
    host = Host()
    assert get(host, fid)[0] == INVALID_FIELD
    assert get(host, fid, SUPPORTED)[0] == INVALID_FIELD
    assert put(host, fid, 0) == INVALID_FIELD
    assert put(host, fid, 0, save=True) == INVALID_FIELD


@pytest.mark.parametrize(
    ("fid", "same", "other"),
    [
        (0x01, 7, 0),
        (0x05, 0, 1),
        (0x05, 0, 1 << 16),
        (0x08, 0, 1),
        (0x08, 0, 1 << 8),
        (0x15, 0, 1),
        (0x15, 0, 1 << 16),
    ],
)
def test_what_is_fixed_takes_its_value_only(fid: int, same: int, other: int) -> None:
    host = Host()
    nsid = 1 if fid == 0x05 else 0
    assert put(host, fid, same, nsid) == 0
    assert put(host, fid, other, nsid) == NOT_CHANGEABLE
    assert get(host, fid, nsid=nsid) == (0, same)


@pytest.mark.parametrize("fid", sorted(set(DEFAULTS) - {0x05}))
def test_nsid_of_controller_features(fid: int) -> None:
    host = Host()
    cdw11, default = DEFAULTS[fid]
    for nsid in (0, 1, 0xFFFFFFFF):
        assert get(host, fid, cdw11=cdw11, nsid=nsid) == (0, default)
    assert get(host, fid, cdw11=cdw11, nsid=2)[0] == INVALID_FIELD  # inactive
    assert get(host, fid, cdw11=cdw11, nsid=9)[0] == INVALID_NAMESPACE
    assert put(host, fid, 0, nsid=1) == NOT_NAMESPACE
    assert put(host, fid, 0, nsid=2) == INVALID_FIELD
    assert put(host, fid, 0, nsid=9) == INVALID_NAMESPACE


def test_nsid_of_namespace_features() -> None:
    host = Host()
    assert get(host, 0x05, nsid=1) == (0, 0)
    for nsid in (0, 9, 0xFFFFFFFF):
        assert get(host, 0x05, nsid=nsid)[0] == INVALID_NAMESPACE
    assert get(host, 0x05, nsid=2)[0] == INVALID_FIELD
    assert put(host, 0x05, 0, nsid=0xFFFFFFFF) == 0
    assert put(host, 0x05, 0, nsid=0) == INVALID_NAMESPACE


def test_power_management() -> None:
    host = Host()
    assert put(host, 0x02, 1) == INVALID_FIELD
    assert put(host, 0x02, 2 << 5) == 0  # workload hint
    assert get(host, 0x02) == (0, 2 << 5)


def test_temperature_thresholds() -> None:
    host = Host()
    under = 1 << 20
    assert get(host, 0x04, cdw11=under) == (0, 0)
    assert put(host, 0x04, 350) == 0
    assert put(host, 0x04, 200 | under) == 0
    assert put(host, 0x04, 351 | 15 << 16) == 0  # all sensors
    assert (get(host, 0x04), get(host, 0x04, cdw11=under)) == ((0, 351), (0, 200))
    assert get(host, 0x04, DEFAULT) == (0, 343)
    for bad in (1 << 16, 8 << 16, 14 << 16, 2 << 20, 3 << 20):
        assert put(host, 0x04, 300 | bad) == INVALID_FIELD
        assert get(host, 0x04, cdw11=bad)[0] == INVALID_FIELD
    assert get(host, 0x04, cdw11=15 << 16)[0] == INVALID_FIELD


def test_volatile_write_cache() -> None:
    """Switched off: what was written before is made durable, and each write from then on; until a reset."""
    host = Host()
    assert put(host, 0x06, 0) == 0
    assert (get(host, 0x06), host.plane.flushes, host.plane.write_through) == ((0, 0), 1, [True])
    host.next_worker()
    assert (get(host, 0x06), host.plane.write_through) == ((0, 0), [True])
    assert put(host, 0x06, 1) == 0
    assert (get(host, 0x06), host.plane.flushes, host.plane.write_through) == ((0, 1), 0, [True, False])
    put(host, 0x06, 0)
    host.write32(0x14, 0)
    host.write32(0x14, CC_ENABLE)
    assert get(host, 0x06) == (0, 1)
    host.next_worker()
    assert host.plane.write_through == [False]


def test_number_of_queues() -> None:
    host = Host()
    result = host.submit(0x09, cdw={10: 0x07, 11: 1 << 16 | 1})
    assert result is not None
    assert (result.code, result.dw0) == (0, 63 << 16 | 63)
    assert put(host, 0x07, 0xFFFF) == INVALID_FIELD
    assert put(host, 0x07, 0xFFFF << 16) == INVALID_FIELD
    assert host.create_cq(1) == 0
    assert put(host, 0x07, 1 << 16 | 1) == SEQUENCE
    assert host.delete_cq(1) == 0
    assert put(host, 0x07, 1 << 16 | 1) == SEQUENCE
    assert get(host, 0x07) == (0, 63 << 16 | 63)
    host.write32(0x14, 0)
    host.write32(0x14, CC_ENABLE)
    assert put(host, 0x07, 1 << 16 | 1) == 0


def test_interrupt_vector_configuration() -> None:
    host = Host()
    assert put(host, 0x09, 3 | 1 << 16) == INVALID_FIELD  # no completion queue uses it
    assert host.create_cq(1, vector=3) == 0
    assert put(host, 0x09, 3 | 1 << 16) == 0
    assert get(host, 0x09, cdw11=3) == (0, 3 | 1 << 16)
    assert get(host, 0x09, cdw11=2) == (0, 2)
    assert get(host, 0x09, cdw11=64) == (0, 64)
    assert get(host, 0x09, cdw11=65)[0] == INVALID_FIELD


def test_asynchronous_event_configuration() -> None:
    host = Host()
    assert put(host, 0x0B, 1 << 13 | 1 << 8 | 0x3F) == 0
    assert get(host, 0x0B) == (0, 1 << 13 | 1 << 8 | 0x3F)
    for bit in (6, 7, 9, 10, 11, 12, 14, 15, 27, 31):
        assert put(host, 0x0B, 1 << bit) == INVALID_FIELD
    assert get(host, 0x0B) == (0, 1 << 13 | 1 << 8 | 0x3F)


def test_command_set_profile() -> None:
    host = Host()
    assert put(host, 0x19, 0) == 0
    assert put(host, 0x19, 1) == SET_REJECTED


def test_timestamp_counts_from_the_reset_or_from_what_the_host_set() -> None:
    host = Host()
    host.clock.advance_ns(2_500_000_000)
    assert get(host, 0x0E) == (0, 0)
    assert int.from_bytes(host.buffer(6), "little") == 2500
    assert host.memory.data[BUFFER + 6] == 0  # origin: the reset

    host.memory.write(BUFFER, (1_700_000_000_000).to_bytes(6, "little") + b"\xff\xff")
    assert put(host, 0x0E, 0) == 0
    host.clock.advance_ns(1_000_000)
    host.next_worker()
    assert get(host, 0x0E) == (0, 0)
    assert int.from_bytes(host.buffer(6), "little") == 1_700_000_000_001
    assert host.memory.data[BUFFER + 6] == 1 << 1  # origin: Set Features
    assert get(host, 0x0E, DEFAULT) == (0, 0)
    assert host.buffer(8) == bytes(8)

    assert host.code(0x09, prp1=UNMAPPED, cdw={10: 0x0E}) == 0x004
    assert host.code(0x0A, prp1=UNMAPPED, cdw={10: 0x0E}) == 0x004


def test_a_reset_restores_defaults() -> None:
    host = Host()
    put(host, 0x0A, 1)
    put(host, 0x0B, 1 << 8)
    put(host, 0x04, 300)
    assert get(host, 0x0A) == (0, 1)
    host.write32(0x14, 0)
    host.write32(0x14, CC_ENABLE)
    assert (get(host, 0x0A), get(host, 0x0B), get(host, 0x04)) == ((0, 0), (0, 0), (0, 343))
