"""Guest memory: what may be mapped, where it is found, and that nothing outside is ever touched."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpu.errors import DmaFault, VfioUserError
from dpu.guestmap import ADDRESS_MAX, REGIONS_MAX, GuestMap, Mapping, Region

PAGE = 4096
MAPS = Path("/proc/self/maps")
READ, WRITE, BOTH = 1, 2, 3
FILE_PAGES = 16


def memfd(pages: int = FILE_PAGES, *, sealed: bool = True) -> int:
    fd = os.memfd_create("ram", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, pages * PAGE)
    if sealed:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


@pytest.fixture
def ram() -> Iterator[int]:
    fd = memfd()
    for page in range(FILE_PAGES):
        os.pwrite(fd, bytes([page + 1]) * PAGE, page * PAGE)
    yield fd
    os.close(fd)


@pytest.fixture
def guest() -> Iterator[GuestMap]:
    guest = GuestMap()
    yield guest
    guest.close()


def refused(code: int, guest: GuestMap, *arguments: int | None) -> None:
    before = list(guest.regions)
    with pytest.raises(VfioUserError) as caught:
        guest.map(*arguments)  # type: ignore[arg-type]
    assert caught.value.errno == code and guest.regions == before


# ---------------------------------------------------------------------------------------------------- mapping


def test_regions_lead_to_their_place_in_the_file(guest: GuestMap, ram: int) -> None:
    guest.map(0x10000, 2 * PAGE, BOTH, 3 * PAGE, ram)
    guest.map(0x80000, PAGE, BOTH, 0, ram)
    assert guest.read(0x10000, PAGE + 1) == bytes([4]) * PAGE + bytes([5])
    assert guest.read(0x80000 + PAGE - 2, 2) == bytes([1, 1])
    guest.write(0x10000 + PAGE - 1, b"ab")
    assert os.pread(ram, 4, 4 * PAGE - 2) == bytes([4]) + b"ab" + bytes([5])


def test_same_region_again_is_no_error(guest: GuestMap, ram: int) -> None:
    """A worker may see a message that the last one has answered; QEMU's descriptors differ each time."""
    guest.map(0x10000, PAGE, BOTH, PAGE, ram)
    other = os.dup(ram)
    guest.map(0x10000, PAGE, BOTH, PAGE, other)
    os.close(other)
    assert len(guest.regions) == 1


@pytest.mark.parametrize(
    "iova,size,flags,offset",
    [
        (0x10000, 2 * PAGE, BOTH, 2 * PAGE),  # another place in the file
        (0x10000, 2 * PAGE, READ, PAGE),  # other rights
        (0x10000, PAGE, BOTH, PAGE),
        (0x0F000, 2 * PAGE, BOTH, PAGE),
        (0x11000, PAGE, BOTH, 2 * PAGE),
        (0x11000, 3 * PAGE, BOTH, PAGE),
        (0x0F000, 8 * PAGE, BOTH, PAGE),
    ],
)
def test_overlapping_regions_are_refused(
    guest: GuestMap, ram: int, iova: int, size: int, flags: int, offset: int
) -> None:
    guest.map(0x10000, 2 * PAGE, BOTH, PAGE, ram)
    refused(errno.EEXIST, guest, iova, size, flags, offset, ram)


def test_same_region_of_another_file_is_refused(guest: GuestMap, ram: int) -> None:
    guest.map(0x10000, PAGE, BOTH, PAGE, ram)
    other = memfd()
    refused(errno.EEXIST, guest, 0x10000, PAGE, BOTH, PAGE, other)
    refused(errno.EEXIST, guest, 0x10000, PAGE, BOTH, PAGE, None)
    os.close(other)


@pytest.mark.parametrize(
    "offset,size", [(FILE_PAGES * PAGE, PAGE), ((FILE_PAGES - 1) * PAGE, 2 * PAGE), (1 << 40, 1)]
)
def test_regions_beyond_the_file_are_refused(guest: GuestMap, ram: int, offset: int, size: int) -> None:
    refused(errno.EINVAL, guest, 0x10000, size, BOTH, offset, ram)


def test_the_last_byte_of_the_file_can_be_mapped(guest: GuestMap, ram: int) -> None:
    guest.map(0x10000, FILE_PAGES * PAGE, BOTH, 0, ram)
    assert guest.read(0x10000 + FILE_PAGES * PAGE - 1, 1) == bytes([FILE_PAGES])


@pytest.mark.parametrize("seal", [None, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SEAL])
def test_memory_that_may_shrink_is_refused(guest: GuestMap, seal: int | None) -> None:
    fd = memfd(sealed=False)
    if seal is not None:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seal)
    refused(errno.EINVAL, guest, 0x10000, PAGE, BOTH, 0, fd)
    os.close(fd)


def test_what_is_no_memfd_is_refused(guest: GuestMap) -> None:
    reader, writer = os.pipe()
    null, folder = os.open("/dev/zero", os.O_RDWR), os.open("/", os.O_RDONLY)
    for fd in (reader, writer, null, folder):
        refused(errno.EINVAL, guest, 0x10000, PAGE, BOTH, 0, fd)
        os.close(fd)


def test_a_region_without_descriptor_is_known_but_not_reached(guest: GuestMap, ram: int) -> None:
    guest.map(0x10000, PAGE, BOTH, 0, None)
    with pytest.raises(DmaFault):
        guest.find(0x10000, 1, READ)
    with pytest.raises(DmaFault):
        guest.read(0x10000, 1)
    assert len(guest.table()) == 0
    refused(errno.EEXIST, guest, 0x10000, PAGE, BOTH, 0, ram)


@pytest.mark.parametrize("iova", [ADDRESS_MAX - PAGE + 1, ADDRESS_MAX, (1 << 64) - PAGE])
def test_addresses_that_are_negative_to_compiled_code_are_not_reached(guest: GuestMap, ram: int, iova: int) -> None:
    guest.map(iova, PAGE, BOTH, 0, ram)
    with pytest.raises(DmaFault):
        guest.find(iova, 1, READ)
    assert len(guest.table()) == 0


def test_highest_address_that_is_reached(guest: GuestMap, ram: int) -> None:
    guest.map(ADDRESS_MAX - PAGE, PAGE, BOTH, 0, ram)
    assert guest.read(ADDRESS_MAX - 1, 1) == bytes([1])


def test_number_of_regions_is_limited(guest: GuestMap, ram: int) -> None:
    guest.regions = [Region(i * PAGE, PAGE, BOTH, 0, None) for i in range(REGIONS_MAX - 1)]
    guest.map((REGIONS_MAX - 1) * PAGE, PAGE, BOTH, 0, ram)
    refused(errno.ENOSPC, guest, REGIONS_MAX * PAGE, PAGE, BOTH, 0, ram)


def test_a_file_is_mapped_once_and_anew_when_it_has_grown(guest: GuestMap, ram: int) -> None:
    guest.map(0, PAGE, BOTH, 0, ram)
    guest.map(PAGE, PAGE, BOTH, 8 * PAGE, ram)
    first = guest.find(0, 1, READ)
    assert guest.find(PAGE, 1, READ) == first + 8 * PAGE and len(guest._files) == 1
    os.ftruncate(ram, 2 * FILE_PAGES * PAGE)
    os.pwrite(ram, b"new", FILE_PAGES * PAGE)
    guest.map(2 * PAGE, PAGE, BOTH, FILE_PAGES * PAGE, ram)
    assert guest.read(2 * PAGE, 3) == b"new" and len(guest._files) == 2
    guest.unmap(0, 2 * PAGE)
    guest.trim()
    assert len(guest._files) == 1 and guest.read(2 * PAGE, 3) == b"new"


def test_rights_are_those_of_the_region_not_of_the_first_one(guest: GuestMap, ram: int) -> None:
    guest.map(0, PAGE, READ, 0, ram)
    guest.map(PAGE, PAGE, BOTH, PAGE, ram)
    guest.map(2 * PAGE, PAGE, WRITE, 2 * PAGE, ram)
    guest.write(PAGE, b"x")
    guest.write(2 * PAGE, b"y")
    assert os.pread(ram, 1, PAGE) == b"x" and os.pread(ram, 1, 2 * PAGE) == b"y"
    for iova, rights in ((0, WRITE), (2 * PAGE, READ), (0, BOTH)):
        with pytest.raises(DmaFault):
            guest.find(iova, 1, rights)
    with pytest.raises(DmaFault):
        guest.write(0, b"z")
    with pytest.raises(DmaFault):
        guest.read(2 * PAGE, 1)


@pytest.mark.parametrize("rights,protection", [(READ, "r--s"), (WRITE, "rw-s"), (BOTH, "rw-s")])
def test_memory_that_may_only_be_read_is_mapped_so(guest: GuestMap, ram: int, rights: int, protection: str) -> None:
    """Whatever of ours went astray could not write there."""
    guest.map(0, PAGE, rights, 0, ram)
    (line,) = [line for line in MAPS.read_text().splitlines() if line.startswith(f"{guest.find(0, 1, rights):x}-")]
    assert line.split()[1] == protection


# --------------------------------------------------------------------------------------------------- unmapping


def test_unmap_takes_whole_regions_only(guest: GuestMap, ram: int) -> None:
    for i in range(4):
        guest.map(i * 2 * PAGE, 2 * PAGE, BOTH, 0, ram)
    for iova, size in ((PAGE, PAGE), (0, PAGE), (PAGE, 2 * PAGE), (0, 3 * PAGE), (3 * PAGE, 2 * PAGE)):
        with pytest.raises(VfioUserError) as caught:
            guest.unmap(iova, size)
        assert caught.value.errno == errno.ENOENT and len(guest.regions) == 4
    guest.unmap(2 * PAGE, 4 * PAGE)
    assert [region.iova for region in guest.regions] == [0, 6 * PAGE]
    guest.unmap(0, 1 << 63)
    assert not guest.regions


def test_mappings_stay_until_trim(guest: GuestMap, ram: int) -> None:
    """The compiled stage may still have the address."""
    guest.map(0, PAGE, BOTH, 0, ram)
    host = guest.find(0, 1, READ)
    guest.unmap(0, PAGE)
    assert ctypes.string_at(host, 1) == bytes([1])
    guest.trim()
    assert not guest._files and f"{host:x}" not in MAPS.read_text()


# ---------------------------------------------------------------------------------------------------- look-ups


regions_strategy = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 3), st.sampled_from([READ, WRITE, BOTH])), max_size=6
)


@settings(max_examples=60, deadline=None)
@given(parts=regions_strategy, at=st.integers(0, 30 * PAGE), length=st.integers(1, 5 * PAGE))
def test_look_ups_are_those_of_a_list(parts: list[tuple[int, int, int]], at: int, length: int) -> None:
    ram, guest, model = memfd(), GuestMap(), {}
    try:
        iova = 0
        for number, (gap, pages, rights) in enumerate(parts):
            iova += gap * PAGE
            guest.map(iova, pages * PAGE, rights, number * PAGE, ram)
            for page in range(pages):
                model[iova // PAGE + page] = (number, page, rights)
            iova += pages * PAGE
        places = [model.get((at + i) // PAGE) for i in range(length)]
        for rights in (READ, WRITE, BOTH):
            one = places[0] is not None and all(p is not None and p[0] == places[0][0] for p in places)
            may = all(p is not None and p[2] & rights == rights for p in places)
            if one and may:
                host = guest.find(at, length, rights)
                number, page, _ = places[0] or (0, 0, 0)
                base = guest._files[guest.regions[number].key].host  # type: ignore[index]
                assert host == base + (number + page) * PAGE + at % PAGE
            else:
                with pytest.raises(DmaFault):
                    guest.find(at, length, rights)
        if all(p is not None and p[2] & READ for p in places):
            assert len(guest.read(at, length)) == length
        else:
            with pytest.raises(DmaFault):
                guest.read(at, length)
        before = os.pread(ram, FILE_PAGES * PAGE, 0)
        if all(p is not None and p[2] & WRITE for p in places):
            guest.write(at, b"\xa5" * length)
        else:
            with pytest.raises(DmaFault):
                guest.write(at, b"\xa5" * length)
            assert os.pread(ram, FILE_PAGES * PAGE, 0) == before, "written in part"
        table = guest.table()
        assert table["iova"].tolist() == sorted(table["iova"].tolist()) and len(table) == len(parts)
    finally:
        guest.close()
        os.close(ram)


def test_nothing_is_read_or_written_in_no_bytes(guest: GuestMap) -> None:
    assert guest.read(0x1000, 0) == b""
    guest.write(0x1000, b"")


# -------------------------------------------------------------------------------------------------- guard pages

TOUCH = """
import ctypes, os, sys
from dpu.guestmap import Mapping
fd = os.memfd_create("x"); os.ftruncate(fd, {size})
mapping = Mapping(fd, {size}, writable={writable})
ctypes.memset(mapping.host, 1, {inside}) if {writable} else ctypes.string_at(mapping.host, {inside})
print("inside", flush=True)
address = mapping.host + {offset}
ctypes.string_at(address, 1) if {read} else ctypes.memset(address, 1, 1)
"""


@pytest.mark.parametrize(
    "size,offset,writable,read",
    [(8192, -1, True, True), (8192, 8192, True, True), (5000, 8192, True, False), (4096, 0, False, False)],
)
def test_beside_a_mapping_there_is_nothing(size: int, offset: int, writable: bool, read: bool) -> None:
    code = TOUCH.format(size=size, inside=size, offset=offset, writable=writable, read=read)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "inside\n" and done.returncode == -11, done.stderr


def test_a_mapping_that_fails_leaves_nothing() -> None:
    before = MAPS.read_text().count("\n")
    reader, writer = os.pipe()
    for _ in range(8):
        with pytest.raises(OSError):
            Mapping(reader, PAGE)
    assert MAPS.read_text().count("\n") - before < 8
    os.close(reader)
    os.close(writer)
