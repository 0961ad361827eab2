"""Wire structures and bit tables against the specification's figures, written out here."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from dpu.nvme import wire
from dpu.nvme.bits import Bits


def test_submission_entry_offsets() -> None:
    """Base figure 87: CDW0 at 0, NSID 4, MPTR 16, DPTR 24, CDW10 40."""
    raw = struct.pack("<BBHIQQQQ6I", 0xA1, 0xB2, 0xC3D4, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15)
    entry = wire.SubmissionEntry.from_buffer_copy(raw)
    assert (entry.opcode, entry.flags, entry.cid, entry.nsid) == (0xA1, 0xB2, 0xC3D4, 1)
    assert (entry.cdw2, entry.cdw3, entry.mptr, entry.prp1, entry.prp2) == (2, 0, 3, 4, 5)
    words = (entry.cdw10, entry.cdw11, entry.cdw12, entry.cdw13, entry.cdw14, entry.cdw15)
    assert words == (10, 11, 12, 13, 14, 15)
    dtype = np.dtype(wire.SubmissionEntry)
    assert dtype.itemsize == 64
    assert np.frombuffer(raw, dtype)[0]["prp2"] == 5


def test_completion_entry_offsets() -> None:
    """Base figure 90: DW0, DW1, SQHD 15:0 and SQID 31:16 of DW2, CID 15:0 and P + Status of DW3."""
    raw = struct.pack("<IIHHHH", 1, 2, 3, 4, 5, 6)
    entry = wire.CompletionEntry.from_buffer_copy(raw)
    assert (entry.dw0, entry.dw1, entry.sqhd, entry.sqid, entry.cid, entry.status) == (1, 2, 3, 4, 5, 6)
    assert np.dtype(wire.CompletionEntry).itemsize == 16


def test_dsm_range_offsets() -> None:
    """NVM 3.2.3: context attributes, length in logical blocks, starting LBA."""
    entry = wire.DsmRange.from_buffer_copy(struct.pack("<IIQ", 1, 2, 3))
    assert (entry.cattr, entry.nlb, entry.slba) == (1, 2, 3)


def test_status_field_places_code_type_dnr_and_more() -> None:
    """CQE DW3: SC 24:17, SCT 27:25, M 30, DNR 31; the field starts at bit 17."""
    dw3 = wire.Status.INVALID_QUEUE_DELETION.field(dnr=True, more=True) << 17
    assert dw3 >> 17 & 0xFF == 0x0C
    assert dw3 >> 25 & 7 == 1
    assert dw3 >> 30 & 1 == 1
    assert dw3 >> 31 & 1 == 1
    assert wire.Status.SUCCESS.field() == 0


@pytest.mark.parametrize(
    ("status", "value"),
    [
        ("INVALID_OPCODE", 0x001),
        ("INVALID_FIELD", 0x002),
        ("DATA_TRANSFER_ERROR", 0x004),
        ("INVALID_NAMESPACE_OR_FORMAT", 0x00B),
        ("COMMAND_SEQUENCE_ERROR", 0x00C),
        ("PRP_OFFSET_INVALID", 0x013),
        ("NAMESPACE_WRITE_PROTECTED", 0x020),
        ("LBA_OUT_OF_RANGE", 0x080),
        ("CAPACITY_EXCEEDED", 0x081),
        ("COMPLETION_QUEUE_INVALID", 0x100),
        ("INVALID_QUEUE_IDENTIFIER", 0x101),
        ("INVALID_QUEUE_SIZE", 0x102),
        ("ASYNC_EVENT_LIMIT_EXCEEDED", 0x105),
        ("INVALID_INTERRUPT_VECTOR", 0x108),
        ("INVALID_LOG_PAGE", 0x109),
        ("INVALID_QUEUE_DELETION", 0x10C),
        ("FEATURE_NOT_SAVEABLE", 0x10D),
        ("FEATURE_NOT_CHANGEABLE", 0x10E),
        ("FEATURE_NOT_NAMESPACE_SPECIFIC", 0x10F),
        ("WRITE_FAULT", 0x280),
        ("UNRECOVERED_READ_ERROR", 0x281),
        ("COMPARE_FAILURE", 0x285),
    ],
)
def test_status_codes(status: str, value: int) -> None:
    assert wire.Status[status] == value


def test_bits_encode_and_decode() -> None:
    bits = Bits(LOW=(0, 3), MIDDLE=(4, 4), HIGH=(28, 31))
    word = bits.encode(LOW=9, HIGH=0xA)
    assert word == 0xA0000009
    assert bits.decode(word) == {"LOW": 9, "MIDDLE": 0, "HIGH": 0xA}
    assert bits.mask("MIDDLE", "HIGH") == 0xF0000010
    assert bits.mask() == 0xF000001F
    with pytest.raises(AssertionError):
        bits.encode(LOW=16)
