"""What a row of the command tables says, and the I/O commands' rows (the compiled stage executes those).

The admin rows are in ``admin.COMMANDS``. The Commands Supported and Effects log is made from both.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dpu.nvme.bits import Bits
from dpu.nvme.interfaces import Completion
from dpu.nvme.wire import NvmOpcode, Status, SubmissionEntry

if TYPE_CHECKING:
    from dpu.nvme.controller import Controller

Handler = Callable[["Controller", SubmissionEntry, int], Awaitable[Completion | None]]

# Commands Supported and Effects data structure, and the scopes of features (Base figures 210 and 256).
EFFECTS: Final = Bits(CSUPP=(0, 0), LBCC=(1, 1), NCC=(2, 2), NIC=(3, 3), CCC=(4, 4), CSE=(16, 18), CSP=(20, 31))
SCOPE_NAMESPACE: Final = 1 << 0
SCOPE_CONTROLLER: Final = 1 << 1

READS: Final = EFFECTS.encode(CSUPP=1, CSP=SCOPE_NAMESPACE)
CHANGES_BLOCKS: Final = EFFECTS.encode(CSUPP=1, LBCC=1, CSP=SCOPE_NAMESPACE)
FORMATS: Final = EFFECTS.encode(CSUPP=1, LBCC=1, NCC=1, CSE=1, CSP=SCOPE_NAMESPACE)
CHANGES_NAMESPACES: Final = EFFECTS.encode(CSUPP=1, NCC=1, NIC=1, CSP=SCOPE_NAMESPACE)
CONTROLLER: Final = EFFECTS.encode(CSUPP=1, CSP=SCOPE_CONTROLLER)

SUCCESS: Final = Completion(Status.SUCCESS.field())


@dataclass(frozen=True)
class Command:
    """One admin command.

    :param handler: (controller, entry, token) -> completion, or None when the command is parked
    :param effects: its entry in the effects log
    :param uses_nsid: False: any NSID but 0 is Invalid Field in Command (Base figure 87)
    :param section: where the Base specification describes it

    The direction of its data is in bits 1:0 of the opcode (Base figure 138).
    """

    handler: Handler
    effects: int
    section: str
    uses_nsid: bool = False


IO_EFFECTS: Final[dict[int, int]] = {
    NvmOpcode.FLUSH: READS,
    NvmOpcode.WRITE: CHANGES_BLOCKS,
    NvmOpcode.READ: READS,
    NvmOpcode.WRITE_UNCORRECTABLE: CHANGES_BLOCKS,
    NvmOpcode.COMPARE: READS,
    NvmOpcode.WRITE_ZEROES: CHANGES_BLOCKS,
    NvmOpcode.DATASET_MANAGEMENT: CHANGES_BLOCKS,
    NvmOpcode.VERIFY: READS,
    NvmOpcode.COPY: CHANGES_BLOCKS,
}
