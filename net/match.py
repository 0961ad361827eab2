"""Which packets: values of header fields, as the bytes and the mask that eBPF compares a frame with.

Use: ``Match({"bth.opcode": Opcode.SACK, "bth.psn": 7})``; ``match.accepts(frame)``; ``Match()`` takes every packet.
Headers by name: outer and inner (IPv6), udp, bth, and behind it meth, reth, seth, ccstate, neth, peth, erth, eeth, as
they stand without TSETH. Fields as in net.mrc.wire.
Limits: the frame has an outer IPv6 header, and the fields lie in its first 160 bytes.
Errors: RequestError for a name that is not known or a value that does not fit.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from net.ebpf.programs import LIFT_WINDOW_BYTES
from net.errors import RequestError
from net.mrc import wire
from net.mrc.frame import ETHERNET_BYTES, IPV6_BYTES, UDP_BYTES

_UDP = ETHERNET_BYTES + 2 * IPV6_BYTES
_BTH = _UDP + UDP_BYTES
_NEXT = _BTH + wire.CODECS[wire.Bth].size

HEADERS: dict[str, tuple[int, type[tuple[Any, ...]]]] = {
    "outer": (ETHERNET_BYTES, wire.Ipv6),
    "inner": (ETHERNET_BYTES + IPV6_BYTES, wire.Ipv6),
    "udp": (_UDP, wire.Udp),
    "bth": (_BTH, wire.Bth),
    "meth": (_NEXT, wire.Meth),
    "reth": (_NEXT + wire.CODECS[wire.Meth].size, wire.Reth),
    "seth": (_NEXT, wire.Seth),
    "ccstate": (_NEXT + wire.CODECS[wire.Seth].size, wire.CcState),
    "neth": (_NEXT, wire.Neth),
    "peth": (_NEXT, wire.Peth),
    "erth": (_NEXT, wire.Erth),
    "eeth": (_NEXT, wire.Eeth),
}


def _places() -> dict[str, tuple[int, int]]:
    """Field by name -> (first bit in the frame, bits)."""
    found = {}
    for header, (start, kind) in HEADERS.items():
        bit = 8 * start
        for spec in wire.fields(kind):
            if bit + spec.bits.size <= 8 * LIFT_WINDOW_BYTES:
                found[f"{header}.{spec.name}"] = (bit, spec.bits.size)
            bit += spec.bits.size
    return found


FIELDS = _places()


class Match:
    """``value`` and ``mask``: LIFT_WINDOW_BYTES bytes each."""

    def __init__(self, fields: Mapping[str, int | bytes] | None = None) -> None:
        value = mask = 0
        width = 8 * LIFT_WINDOW_BYTES
        for name, wanted in (fields or {}).items():
            if name not in FIELDS:
                near = difflib.get_close_matches(name, FIELDS, n=1)
                raise RequestError(
                    f'there is no field "{name}"', f"did you mean {near[0]}?" if near else "see net.match"
                )
            first, bits = FIELDS[name]
            number = int.from_bytes(wanted, "big") if isinstance(wanted, bytes) else int(wanted)
            if not 0 <= number < 1 << bits:
                raise RequestError(f"{name} = {number} does not fit", f"it has {bits} bits")
            shift = width - first - bits
            value |= number << shift
            mask |= (1 << bits) - 1 << shift
        self.value = value.to_bytes(LIFT_WINDOW_BYTES, "big")
        self.mask = mask.to_bytes(LIFT_WINDOW_BYTES, "big")
        self._number, self._bits = value, mask

    def accepts(self, frame: bytes) -> bool:
        """Whether a frame is one of them; what is behind its end counts as zeros."""
        window = int.from_bytes(frame[:LIFT_WINDOW_BYTES].ljust(LIFT_WINDOW_BYTES, b"\0"), "big")
        return window & self._bits == self._number
