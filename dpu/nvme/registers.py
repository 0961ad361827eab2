"""Controller registers: offset, width and fields of each, declared once (Base 3.1.3, figure 35).

Use: ``CC.fields.get(word, "EN")``; ``MAP`` lists every register by offset, ``CAPABILITIES`` and ``VERSION`` are
the constant ones. Registers that the controller does not have (CMB, PMR, boot partition, NSSR) read as zero.

Limits: BAR0 below 1000h; doorbells are the data plane's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dpu.layout import QUEUE_ENTRIES_MAX
from dpu.nvme.bits import Bits

REGISTERS_BYTES: Final = 0x1000
READY_TIMEOUT_500MS: Final = 30  # CAP.TO and CRTO.CRWMT: 15 s, so that a slow host is no failed controller


@dataclass(frozen=True)
class Register:
    """One register: its spec name, offset in BAR0 (bytes), width (bytes) and fields."""

    name: str
    offset: int
    width: int
    fields: Bits


CAP: Final = Register(
    "CAP",
    0x00,
    8,
    Bits(
        MQES=(0, 15),  # 0's based
        CQR=(16, 16),
        AMS=(17, 18),
        TO=(24, 31),
        DSTRD=(32, 35),
        NSSRS=(36, 36),
        CSS=(37, 44),
        BPS=(45, 45),
        CPS=(46, 47),
        MPSMIN=(48, 51),
        MPSMAX=(52, 55),
        PMRS=(56, 56),
        CMBS=(57, 57),
        NSSS=(58, 58),
        CRMS=(59, 60),
    ),
)
VS: Final = Register("VS", 0x08, 4, Bits(TER=(0, 7), MNR=(8, 15), MJR=(16, 31)))
INTMS: Final = Register("INTMS", 0x0C, 4, Bits(IVMS=(0, 31)))
INTMC: Final = Register("INTMC", 0x10, 4, Bits(IVMC=(0, 31)))
CC: Final = Register(
    "CC",
    0x14,
    4,
    Bits(
        EN=(0, 0),
        CSS=(4, 6),
        MPS=(7, 10),
        AMS=(11, 13),
        SHN=(14, 15),
        IOSQES=(16, 19),
        IOCQES=(20, 23),
    ),
)
CSTS: Final = Register("CSTS", 0x1C, 4, Bits(RDY=(0, 0), CFS=(1, 1), SHST=(2, 3), NSSRO=(4, 4), PP=(5, 5), ST=(6, 6)))
AQA: Final = Register("AQA", 0x24, 4, Bits(ASQS=(0, 11), ACQS=(16, 27)))  # both 0's based
ASQ: Final = Register("ASQ", 0x28, 8, Bits(ASQB=(0, 63)))
ACQ: Final = Register("ACQ", 0x30, 8, Bits(ACQB=(0, 63)))
CRTO: Final = Register("CRTO", 0x68, 4, Bits(CRWMT=(0, 15), CRIMT=(16, 31)))

MAP: Final = (CAP, VS, INTMS, INTMC, CC, CSTS, AQA, ASQ, ACQ, CRTO)

CSS_NVM: Final = 1 << 0  # CAP.CSS bit 0: the NVM Command Set
CC_CSS_NVM: Final = 0b000
CRMS_WITH_MEDIA: Final = 0b01  # 2.0 controllers: ready means that the media is ready too

SHN_NONE: Final = 0b00
SHN_NORMAL: Final = 0b01
SHN_ABRUPT: Final = 0b10
SHST_NORMAL: Final = 0b00
SHST_OCCURRING: Final = 0b01
SHST_COMPLETE: Final = 0b10

IOSQES: Final = 6  # 2^6 = 64 bytes, the only SQE size
IOCQES: Final = 4  # 2^4 = 16 bytes, the only CQE size

VERSION: Final = VS.fields.encode(MJR=2)
CAPABILITIES: Final = CAP.fields.encode(
    MQES=QUEUE_ENTRIES_MAX - 1,  # 0's based
    CQR=1,
    TO=READY_TIMEOUT_500MS,
    CSS=CSS_NVM,
    CRMS=CRMS_WITH_MEDIA,
)
READY_TIMEOUTS: Final = CRTO.fields.encode(CRWMT=READY_TIMEOUT_500MS)
