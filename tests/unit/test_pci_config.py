"""The PCI configuration space, read as a driver reads it (PCI Local Bus 3.0, PCI Express Base 4.0)."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpu.vfio_user.pci_config import CONFIG_BYTES, PciConfig

ACCESS = st.integers(0, CONFIG_BYTES - 8).flatmap(lambda at: st.tuples(st.just(at), st.binary(max_size=8)))


def word(config: PciConfig, offset: int, form: str) -> int:
    return int(struct.unpack("<" + form, config.read(offset, struct.calcsize("<" + form)))[0])


def capabilities(config: PciConfig) -> dict[int, int]:
    """Capability id -> offset, by walking the list from the pointer at 34h (PCI 6.7)."""
    found: dict[int, int] = {}
    at = word(config, 0x34, "B")
    assert word(config, 0x06, "H") & 0x10, "Status: capabilities list"
    while at:
        assert at >= 0x40 and at % 4 == 0 and at not in found.values()
        found[word(config, at, "B")] = at
        at = word(config, at + 1, "B")
    return found


def bar_size(config: PciConfig, bar: int, wide: bool) -> int:
    """PCI 6.2.5.1: write all ones, read back, clear the type bits, invert, add one."""
    at, form, ones = 0x10 + 4 * bar, ("Q" if wide else "I"), b"\xff" * (8 if wide else 4)
    before = config.read(at, len(ones))
    config.write(at, ones)
    mask = word(config, at, form) & ~0xF
    config.write(at, before)
    return (1 << 8 * len(ones)) - mask if mask else 0


def test_a_driver_finds_an_nvme_function() -> None:
    config = PciConfig(65)
    assert config.read(0x09, 3) == bytes([0x02, 0x08, 0x01])  # NVMe PCIe Transport 3.8.1.5: class code
    assert word(config, 0x0E, "B") == 0  # header type: one function, type 0
    assert word(config, 0x3D, "B") == 0  # no interrupt pin
    assert (word(config, 0x00, "H"), word(config, 0x02, "H")) != (0x1B36, 0x0010)  # Linux quirks
    assert set(capabilities(config)) == {0x01, 0x10, 0x11}
    assert word(config, 0x100, "I") == 0  # no extended capability


def test_bars() -> None:
    config = PciConfig(65)
    assert word(config, 0x10, "I") & 0xF == 0b0100  # memory, 64 bits
    assert [bar_size(config, 0, True), bar_size(config, 4, False), bar_size(config, 5, False)] == [
        0x4000,
        0x2000,
        0x1000,
    ]
    assert [bar_size(config, bar, False) for bar in (2, 3)] == [0, 0]
    config.write(0x30, b"\xff" * 4)
    assert word(config, 0x30, "I") == 0  # no ROM


@pytest.mark.parametrize("vectors", [1, 65, 512])
def test_msix(vectors: int) -> None:
    config = PciConfig(vectors)
    at = capabilities(config)[0x11]
    assert word(config, at + 2, "H") == vectors - 1  # Table Size is 0's based (PCI 6.8.2.3)
    assert (word(config, at + 4, "I"), word(config, at + 8, "I")) == (4, 5)  # BAR indicators, offset 0
    config.write(at + 2, b"\xff\xff")
    assert word(config, at + 2, "H") == 0xC000 | vectors - 1


def test_msi_only() -> None:
    config = PciConfig(1, msix=False)
    at = capabilities(config)[0x05]
    assert set(capabilities(config)) == {0x01, 0x05, 0x10}
    config.write(at + 2, b"\xff\xff")
    assert word(config, at + 2, "H") == 0x0081  # 64-bit address, one vector, enabled
    assert bar_size(config, 4, False) == 0


def test_command_register() -> None:
    config = PciConfig(65)
    assert not config.bus_master
    config.write(0x04, struct.pack("<H", 0x0404))  # what SPDK's initiator sets
    assert config.bus_master and config.command == 0x0404
    config.write(0x04, b"\xff\xff")
    assert config.command & 0x0001 == 0  # no I/O space
    assert word(config, 0x06, "H") == 0x0010


def test_function_level_reset_is_reported_and_not_stored() -> None:
    config = PciConfig(65)
    control = capabilities(config)[0x10] + 8
    assert word(config, control - 4, "I") >> 28 & 1  # Device Capabilities: FLR
    value = word(config, control, "H")
    assert config.write(control, struct.pack("<H", value | 0x8000))
    assert config.write(control + 1, b"\x80")
    assert config.write(control - 2, bytes(3) + b"\x80")
    assert not config.write(control, struct.pack("<H", 0x7FFF))
    assert not config.write(control + 2, b"\xff\xff")
    assert not config.write(control, b"\x80")
    assert word(config, control, "H") & 0x8000 == 0


@given(st.lists(ACCESS, max_size=40), st.booleans())
def test_read_only_bits_never_change(accesses: list[tuple[int, bytes]], msix: bool) -> None:
    config, all_ones = PciConfig(64, msix=msix), PciConfig(64, msix=msix)
    zero = config.read(0, CONFIG_BYTES)
    all_ones.write(0, b"\xff" * CONFIG_BYTES)
    writable = bytes(a ^ b for a, b in zip(zero, all_ones.read(0, CONFIG_BYTES)))
    model = bytearray(zero)
    for offset, data in accesses:
        config.write(offset, data)
        model[offset : offset + len(data)] = data
    reset_to_one = PciConfig(64, msix=msix)
    reset_to_one.write(0, bytes(CONFIG_BYTES))
    writable = bytes(w | (a ^ b) for w, a, b in zip(writable, zero, reset_to_one.read(0, CONFIG_BYTES)))
    expected = bytes((m & w) | (z & ~w & 0xFF) for m, w, z in zip(model, writable, zero))
    assert config.read(0, CONFIG_BYTES) == expected


@given(st.lists(ACCESS, max_size=20))
def test_dump_and_load(accesses: list[tuple[int, bytes]]) -> None:
    config, other = PciConfig(65), PciConfig(65)
    for offset, data in accesses:
        config.write(offset, data)
    other.write(0x04, b"\xff\xff")
    other.load(config.dump())
    assert other.read(0, CONFIG_BYTES) == config.read(0, CONFIG_BYTES)
    other.reset()
    assert other.read(0, CONFIG_BYTES) == PciConfig(65).read(0, CONFIG_BYTES)
