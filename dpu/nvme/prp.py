"""Data of admin commands in guest memory by PRP1 and PRP2 (Base 4.1.1).

Use: ``write(memory, sqe, data)`` and ``read(memory, sqe, length)``; both raise ``CommandError``.

Limits: at most ``TRANSFER_MAX`` bytes (MDTS; the callers check), so a list has at most 64 entries; a chained
list page starts at its beginning and so always makes progress: a loop of lists ends with the length.

Errors: PRP Offset Invalid for an entry or list pointer with an offset that it must not have, Data Transfer Error
for an address outside the DMA map.
"""

from __future__ import annotations

import struct

from dpu.errors import DmaFault
from dpu.layout import TRANSFER_MAX
from dpu.nvme.errors import CommandError
from dpu.nvme.interfaces import GuestMemory
from dpu.nvme.wire import PAGE_BYTES, PRP1_LOCATION, PRP2_LOCATION, Status, SubmissionEntry


def write(memory: GuestMemory, sqe: SubmissionEntry, data: bytes) -> None:
    """Controller to host."""
    try:
        done = 0
        for iova, length in segments(memory, sqe.prp1, sqe.prp2, len(data)):
            memory.write(iova, data[done : done + length])
            done += length
    except DmaFault as fault:
        raise CommandError(Status.DATA_TRANSFER_ERROR, dnr=False) from fault


def read(memory: GuestMemory, sqe: SubmissionEntry, length: int) -> bytes:
    """Host to controller: ``length`` bytes."""
    try:
        return memory.gather(segments(memory, sqe.prp1, sqe.prp2, length))
    except DmaFault as fault:
        raise CommandError(Status.DATA_TRANSFER_ERROR, dnr=False) from fault


def segments(memory: GuestMemory, prp1: int, prp2: int, length: int) -> list[tuple[int, int]]:
    """Where ``length`` bytes lie in guest memory: (iova, bytes), in order."""
    assert 0 < length <= TRANSFER_MAX, length
    if prp1 % 4:
        raise CommandError(Status.PRP_OFFSET_INVALID, location=PRP1_LOCATION)
    first = min(length, PAGE_BYTES - prp1 % PAGE_BYTES)
    found = [(prp1, first)]
    remaining = length - first
    if not remaining:
        return found
    pages = -(-remaining // PAGE_BYTES)
    addresses = [prp2] if pages == 1 else _list(memory, prp2, pages)
    for address in addresses:
        if address % PAGE_BYTES:
            raise CommandError(Status.PRP_OFFSET_INVALID, location=PRP2_LOCATION)
        found.append((address, min(remaining, PAGE_BYTES)))
        remaining -= PAGE_BYTES
    return found


def _list(memory: GuestMemory, pointer: int, pages: int) -> list[int]:
    """The ``pages`` entries of the PRP list at ``pointer``; the last entry of a full list page chains."""
    entries: list[int] = []
    if pointer % 8:
        raise CommandError(Status.PRP_OFFSET_INVALID, location=PRP2_LOCATION)
    while True:
        room = (PAGE_BYTES - pointer % PAGE_BYTES) // 8
        missing = pages - len(entries)
        count = min(missing, room)
        words = struct.unpack(f"<{count}Q", memory.read(pointer, 8 * count))
        if missing <= room:
            return [*entries, *words]
        entries += words[:-1]
        pointer = words[-1]
        if pointer % PAGE_BYTES:
            raise CommandError(Status.PRP_OFFSET_INVALID, location=PRP2_LOCATION)
