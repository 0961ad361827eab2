"""Features: one row each (Base 5.27.1, 5.15).

Use: ``get_features`` and ``set_features`` are the handlers of the two commands; ``FEATURES`` the rows; a
controller keeps its current values in ``FeatureValues``.

A feature that we could only pretend to honour has one value, and setting another is Feature Not Changeable:
Arbitration (the stage has a fixed batch), Error Recovery (no time limit), Interrupt Coalescing (none: one
interrupt per pass), LBA Status Information Attributes (alerts are not delayed). Nothing is saveable.

Errors: Invalid Field in Command for a feature without a row; Feature Identifier Not Saveable; Feature Not
Changeable; Feature Not Namespace Specific; the NSID's errors; Command Sequence Error (Number of Queues).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from dpu.layout import IO_QUEUES
from dpu.nvme import prp
from dpu.nvme.bits import Bits
from dpu.nvme.commands import SUCCESS
from dpu.nvme.errors import CommandError
from dpu.nvme.interfaces import Completion
from dpu.nvme.wire import (
    BROADCAST_NSID,
    CDW10_LOCATION,
    CDW11_LOCATION,
    NSID_LOCATION,
    Status,
    SubmissionEntry,
)

if TYPE_CHECKING:
    from dpu.nvme.controller import Controller

TEMPERATURE_K: Final = 308  # composite: there is no thermal model
WARNING_TEMPERATURE_K: Final = 343  # WCTEMP
CRITICAL_TEMPERATURE_K: Final = 353  # CCTEMP
CRITICAL_WARNING_TEMPERATURE: Final = 1 << 1

GET_CDW10: Final = Bits(FID=(0, 7), SEL=(8, 10))
SET_CDW10: Final = Bits(FID=(0, 7), SV=(31, 31))
SEL_CURRENT, SEL_DEFAULT, SEL_SAVED, SEL_SUPPORTED = range(4)
CAPABILITIES: Final = Bits(SAVEABLE=(0, 0), NAMESPACE=(1, 1), CHANGEABLE=(2, 2))  # Base figure 193

WRITE_CACHE: Final = 0x06
TIMESTAMP: Final = 0x0E
ASYNC_EVENT: Final = 0x0B
TEMPERATURE_THRESHOLD: Final = 0x04

_WHOLE: Final = Bits(VALUE=(0, 31))


@dataclass(frozen=True)
class Feature:
    """One feature with a 32-bit value; the base class is one that stores what it is given.

    :param name: as in the Base specification
    :param default: its value after a reset
    :param fields: the fields of CDW11 that are its value; other bits are reserved and ignored
    :param namespace: per namespace (NSID must be active), else per controller
    """

    name: str
    default: int = 0
    fields: Bits = _WHOLE
    changeable: bool = True
    namespace: bool = False

    def selector(self, controller: Controller, sqe: SubmissionEntry, *, setting: bool) -> int:
        """Which of the feature's values CDW11 names, for features that have several."""
        return 0

    def default_of(self, selector: int) -> int:
        return self.default

    def check(self, controller: Controller, cdw11: int) -> None:
        """``CommandError`` when the controller cannot take this value."""

    def changed(self, controller: Controller) -> None:
        """The value was set."""

    def read(self, controller: Controller, selector: int, select: int) -> int:
        """The current (SEL_CURRENT), default or saved value; what is not saveable has its default saved."""
        default = self.default_of(selector)
        if select != SEL_CURRENT:
            return default
        return controller.features.values.get((self.name, selector), default)

    def get(self, controller: Controller, sqe: SubmissionEntry, select: int) -> Completion:
        """Get Features: the value in DW0."""
        selector = self.selector(controller, sqe, setting=False)
        return Completion(Status.SUCCESS.field(), self.read(controller, selector, select))

    async def set(self, controller: Controller, sqe: SubmissionEntry) -> Completion:
        """Set Features."""
        self.check(controller, sqe.cdw11)
        selector = self.selector(controller, sqe, setting=True)
        value = sqe.cdw11 & self.fields.mask()
        if not self.changeable and value != self.default_of(selector):
            raise CommandError(Status.FEATURE_NOT_CHANGEABLE, location=CDW11_LOCATION)
        controller.features.values[self.name, selector] = value
        self.changed(controller)
        return SUCCESS


class PowerManagement(Feature):
    """One power state, 0 (NPSS 0)."""

    def check(self, controller: Controller, cdw11: int) -> None:
        if self.fields.get(cdw11, "PS"):
            raise CommandError(Status.INVALID_FIELD, location=CDW11_LOCATION)


class TemperatureThreshold(Feature):
    """An over and an under threshold (THSEL) of the composite temperature (TMPSEL 0; 15 on Set means all)."""

    def selector(self, controller: Controller, sqe: SubmissionEntry, *, setting: bool) -> int:
        sensor, which = self.fields.get(sqe.cdw11, "TMPSEL"), self.fields.get(sqe.cdw11, "THSEL")
        if which > 1 or sensor not in ((0, 15) if setting else (0,)):
            raise CommandError(Status.INVALID_FIELD, location=CDW11_LOCATION)
        return which

    def default_of(self, selector: int) -> int:
        return 0 if selector else WARNING_TEMPERATURE_K

    def read(self, controller: Controller, selector: int, select: int) -> int:
        return self.fields.get(super().read(controller, selector, select), "TMPTH")

    def changed(self, controller: Controller) -> None:
        controller.check_temperature()


class VolatileWriteCache(Feature):
    """On after a reset. While it is off every write is durable when it completes, and so is all that was before."""

    async def set(self, controller: Controller, sqe: SubmissionEntry) -> Completion:
        on = bool(self.fields.get(sqe.cdw11, "WCE"))
        controller.plane.set_write_through(not on)
        if not on:
            await controller.plane.flush()
        return await super().set(controller, sqe)


class NumberOfQueues(Feature):
    """Always allocates all queue pairs, whatever is asked for; not after an I/O queue was created."""

    def default_of(self, selector: int) -> int:
        return self.fields.encode(NSQ=IO_QUEUES - 1, NCQ=IO_QUEUES - 1)  # 0's based

    async def set(self, controller: Controller, sqe: SubmissionEntry) -> Completion:
        if 0xFFFF in self.fields.decode(sqe.cdw11).values():
            raise CommandError(Status.INVALID_FIELD, location=CDW11_LOCATION)
        if controller.io_queues_created:
            raise CommandError(Status.COMMAND_SEQUENCE_ERROR)
        return Completion(Status.SUCCESS.field(), self.default_of(0))


class InterruptVectorConfiguration(Feature):
    """CD per vector. Interrupts are never coalesced, so both values are honoured."""

    def selector(self, controller: Controller, sqe: SubmissionEntry, *, setting: bool) -> int:
        vector = self.fields.get(sqe.cdw11, "IV")
        known = vector in {queue.vector for queue in controller.cqs.values()}
        if vector >= controller.vectors or (setting and not known):
            raise CommandError(Status.INVALID_FIELD, location=CDW11_LOCATION)
        return vector

    def default_of(self, selector: int) -> int:
        return selector


class AsynchronousEvents(Feature):
    """Which notices and SMART warnings are reported; those that Identify's OAES does not offer are refused."""

    def check(self, controller: Controller, cdw11: int) -> None:
        if cdw11 & ~self.fields.mask():
            raise CommandError(Status.INVALID_FIELD, location=CDW11_LOCATION)

    def changed(self, controller: Controller) -> None:
        controller.check_temperature()
        controller.check_health()


class Timestamp(Feature):
    """Milliseconds since 1970 as the host set them, or since the reset; 8 bytes of data."""

    _DATA = Bits(TIMESTAMP=(0, 47), SYNCH=(48, 48), ORIGIN=(49, 51))

    def get(self, controller: Controller, sqe: SubmissionEntry, select: int) -> Completion:
        values, word = controller.features, 0
        if select == SEL_CURRENT:
            elapsed_ms = (controller.clock.now_ns() - values.timestamp_at_ns) // 1_000_000
            word = self._DATA.encode(
                TIMESTAMP=(values.timestamp_ms + elapsed_ms) % (1 << 48), ORIGIN=values.timestamp_set
            )
        prp.write(controller.memory, sqe, word.to_bytes(8, "little"))
        return SUCCESS

    async def set(self, controller: Controller, sqe: SubmissionEntry) -> Completion:
        word = int.from_bytes(prp.read(controller.memory, sqe, 8), "little")
        values = controller.features
        values.timestamp_ms = self._DATA.get(word, "TIMESTAMP")
        values.timestamp_at_ns = controller.clock.now_ns()
        values.timestamp_set = True
        return SUCCESS


class HostProfile(Feature):
    """I/O Command Set Profile: combination 0 (the NVM Command Set) is the only one (Identify CNS 1Ch)."""

    def check(self, controller: Controller, cdw11: int) -> None:
        if self.fields.get(cdw11, "IOCSCI"):
            raise CommandError(Status.IO_COMMAND_SET_REJECTED, location=CDW11_LOCATION)


FEATURES: Final[dict[int, Feature]] = {
    0x01: Feature("Arbitration", default=7, fields=Bits(AB=(0, 2)), changeable=False),  # AB 111b: no limit
    0x02: PowerManagement("Power Management", fields=Bits(PS=(0, 4), WH=(5, 7))),
    TEMPERATURE_THRESHOLD: TemperatureThreshold(
        "Temperature Threshold", fields=Bits(TMPTH=(0, 15), TMPSEL=(16, 19), THSEL=(20, 21))
    ),
    0x05: Feature("Error Recovery", fields=Bits(TLER=(0, 15), DULBE=(16, 16)), changeable=False, namespace=True),
    WRITE_CACHE: VolatileWriteCache("Volatile Write Cache", default=1, fields=Bits(WCE=(0, 0))),
    0x07: NumberOfQueues("Number of Queues", fields=Bits(NSQ=(0, 15), NCQ=(16, 31))),
    0x08: Feature("Interrupt Coalescing", fields=Bits(THR=(0, 7), TIME=(8, 15)), changeable=False),
    0x09: InterruptVectorConfiguration("Interrupt Vector Configuration", fields=Bits(IV=(0, 15), CD=(16, 16))),
    0x0A: Feature("Write Atomicity Normal", fields=Bits(DN=(0, 0))),  # AWUN = AWUPF: both are honoured
    ASYNC_EVENT: AsynchronousEvents(
        "Asynchronous Event Configuration", fields=Bits(SMART=(0, 5), NAN=(8, 8), LBASIN=(13, 13))
    ),
    TIMESTAMP: Timestamp("Timestamp"),
    0x15: Feature("LBA Status Information Attributes", fields=Bits(LSIRI=(0, 15), LSIPI=(16, 31)), changeable=False),
    0x19: HostProfile("I/O Command Set Profile", fields=Bits(IOCSCI=(0, 8))),
}


class FeatureValues:
    """The current values of one controller; a Controller Level Reset makes new ones.

    :param now_ns: the time of the reset
    """

    def __init__(self, now_ns: int) -> None:
        self.values: dict[tuple[str, int], int] = {}  # (name, selector): only what was set
        self.timestamp_ms = 0
        self.timestamp_at_ns = now_ns
        self.timestamp_set = False

    @property
    def namespace_notices(self) -> bool:
        """The host asked for Namespace Attribute Notices."""
        return bool(self._events("NAN"))

    @property
    def lba_status_notices(self) -> bool:
        """The host asked for LBA Status Information Notices."""
        return bool(self._events("LBASIN"))

    @property
    def write_through(self) -> bool:
        """The host has switched the volatile write cache off."""
        row = FEATURES[WRITE_CACHE]
        return not self.values.get((row.name, 0), row.default)

    @property
    def smart_warnings(self) -> int:
        """The critical warning bits that the host wants events for."""
        return self._events("SMART")

    def _events(self, field: str) -> int:
        row = FEATURES[ASYNC_EVENT]
        return row.fields.get(self.values.get((row.name, 0), row.default), field)

    def dump(self) -> dict[str, Any]:
        return {
            "values": [[name, selector, value] for (name, selector), value in self.values.items()],
            "timestamp": [self.timestamp_ms, self.timestamp_at_ns, self.timestamp_set],
        }

    def load(self, state: dict[str, Any]) -> None:
        self.values = {(name, selector): value for name, selector, value in state["values"]}
        self.timestamp_ms, self.timestamp_at_ns, self.timestamp_set = state["timestamp"]


def critical_warning(controller: Controller) -> int:
    """The Critical Warning byte of the SMART log."""
    row = FEATURES[TEMPERATURE_THRESHOLD]
    over, under = (row.read(controller, selector, SEL_CURRENT) for selector in (0, 1))
    warning = 0 if under < TEMPERATURE_K < over else CRITICAL_WARNING_TEMPERATURE
    for namespace in controller.subsystem.namespaces():
        warning |= namespace.warning
    return warning


def temperature_event_wanted(controller: Controller) -> bool:
    return bool(controller.features.smart_warnings & CRITICAL_WARNING_TEMPERATURE)


def _row(sqe: SubmissionEntry) -> Feature:
    row = FEATURES.get(GET_CDW10.get(sqe.cdw10, "FID"))
    if row is None:
        raise CommandError(Status.INVALID_FIELD, location=CDW10_LOCATION)
    return row


def _check_nsid(controller: Controller, row: Feature, nsid: int, *, setting: bool) -> None:
    """The NSID of a feature (Base 4.4): 0 and FFFFFFFFh name the controller, or every namespace on Set."""
    if nsid in (0, BROADCAST_NSID):
        if row.namespace and not (setting and nsid):
            raise CommandError(Status.INVALID_NAMESPACE_OR_FORMAT, location=NSID_LOCATION)
        return
    controller.active_namespace(nsid)
    if setting and not row.namespace:
        raise CommandError(Status.FEATURE_NOT_NAMESPACE_SPECIFIC, location=NSID_LOCATION)


async def get_features(controller: Controller, sqe: SubmissionEntry, token: int) -> Completion:
    """Get Features (Base 5.15)."""
    row = _row(sqe)
    select = GET_CDW10.get(sqe.cdw10, "SEL")
    if select > SEL_SUPPORTED:
        raise CommandError(Status.INVALID_FIELD, location=CDW10_LOCATION + 1)
    if select == SEL_SUPPORTED:
        word = CAPABILITIES.encode(NAMESPACE=row.namespace, CHANGEABLE=row.changeable)
        return Completion(Status.SUCCESS.field(), word)
    _check_nsid(controller, row, sqe.nsid, setting=False)
    return row.get(controller, sqe, select)


async def set_features(controller: Controller, sqe: SubmissionEntry, token: int) -> Completion:
    """Set Features (Base 5.27)."""
    row = _row(sqe)
    if SET_CDW10.get(sqe.cdw10, "SV"):
        raise CommandError(Status.FEATURE_NOT_SAVEABLE, location=CDW10_LOCATION + 3)
    _check_nsid(controller, row, sqe.nsid, setting=True)
    return await row.set(controller, sqe)
