"""Registers and admin commands against NVM Express Base 2.0 (section numbers), driven without a VM."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest

from tests.support import front_ends
from tests.support import nvme_driver as nv
from tests.support.daemon import (
    NS_4K,
    NS_512,
    NS_FILE,
    NS_NULL,
    NULL_BYTES,
    STANDARD_BYTES,
    Daemon,
    Target,
)
from tests.support.front_ends import FrontEnd
from tests.support.nvme_driver import PAGE, Nvme, NvmeError
from tests.support.vfio_user_client import BAR0

Connect = Callable[..., Nvme]


@pytest.fixture(scope="module", params=front_ends.rows())
def front_end(request: pytest.FixtureRequest) -> FrontEnd:
    """Every test here runs with every front end."""
    row: FrontEnd = request.param
    return row


ALL_NAMESPACES = [NS_512, NS_4K, NS_NULL, NS_FILE]
ERROR_LOG, SMART_LOG, FIRMWARE_LOG, CHANGED_NAMESPACES_LOG, EFFECTS_LOG = 1, 2, 3, 4, 5


def u16(data: bytes, offset: int) -> int:
    return int(struct.unpack_from("<H", data, offset)[0])


def u32(data: bytes, offset: int) -> int:
    return int(struct.unpack_from("<I", data, offset)[0])


def u64(data: bytes, offset: int) -> int:
    return int(struct.unpack_from("<Q", data, offset)[0])


# --- registers (PCIe transport 3.1)


def test_capabilities_and_version(connect: Connect) -> None:
    nvme = connect()
    cap = nvme.read64(nv.CAP)
    assert cap & 0xFFFF >= 1, "MQES is 0's based and at least 1"
    assert cap >> 16 & 1 == 1, "CQR: queues must be contiguous"
    assert cap >> 24 & 0xFF > 0, "TO"
    assert cap >> 32 & 0xF == 0, "DSTRD: doorbells are 4 bytes apart"
    assert cap >> 37 & 1 == 1, "CSS: the NVM command set"
    assert cap >> 48 & 0xF == 0, "MPSMIN: 4096-byte pages"
    assert cap >> 52 & 0xF >= cap >> 48 & 0xF, "MPSMAX >= MPSMIN"
    assert nvme.read32(nv.VS) == 0x00020000
    assert nvme.read32(nv.CSTS) == 0 and nvme.read32(nv.CC) & 1 == 0


def test_registers_read_the_same_by_4_and_by_8_bytes(connect: Connect) -> None:
    nvme = connect()
    nvme.enable()
    for offset in range(0, 0x38, 8):
        whole = nvme.client.region_read(BAR0, offset, 8)
        halves = nvme.client.region_read(BAR0, offset, 4) + nvme.client.region_read(BAR0, offset + 4, 4)
        assert whole == halves, f"offset {offset:#x}"


@pytest.mark.parametrize("register_bytes", [4, 8])
def test_admin_queue_registers_are_readable_at_all_times(connect: Connect, register_bytes: int) -> None:
    nvme = connect(register_bytes=register_bytes)
    nvme.write32(nv.AQA, 0x0FFF000F)
    nvme.write64(nv.ASQ, 0x1234_5678_9ABC_D000)
    nvme.write64(nv.ACQ, 0xFEDC_BA98_7654_3000)
    assert nvme.read32(nv.AQA) == 0x0FFF000F
    assert nvme.read64(nv.ASQ) == 0x1234_5678_9ABC_D000
    assert nvme.read64(nv.ACQ) == 0xFEDC_BA98_7654_3000
    nvme.enable(16)
    assert nvme.read32(nv.AQA) == 0x000F000F
    assert nvme.read64(nv.ASQ) == nvme.sqs[0].iova and nvme.read64(nv.ACQ) == nvme.cqs[0].iova
    asq, acq = nvme.sqs[0].iova, nvme.cqs[0].iova
    nvme.disable()
    assert (nvme.read64(nv.ASQ), nvme.read64(nv.ACQ)) == (asq, acq), "kept by a controller reset (3.7.2)"


def test_read_only_registers_ignore_writes(connect: Connect) -> None:
    nvme = connect()
    nvme.enable()
    for offset in (nv.CAP, nv.CAP + 4, nv.VS, nv.CSTS):
        before = nvme.read32(offset)
        nvme.write32(offset, ~before & 0xFFFFFFFF & ~0x10)  # CSTS.NSSRO is write 1 to clear
        assert nvme.read32(offset) == before, f"offset {offset:#x}"
    assert nvme.identify(1)


def test_reserved_registers_read_as_zero(connect: Connect) -> None:
    nvme = connect()
    for offset in (0x18, 0x200, 0xE00, 0xFFC):
        nvme.write32(offset, 0xFFFFFFFF)
        assert nvme.read32(offset) == 0, f"offset {offset:#x}"


def test_interrupt_mask_set_and_clear(connect: Connect) -> None:
    """INTMS and INTMC (3.1.4.4): both read as the current mask."""
    nvme = connect(vectors=0)
    assert nvme.read32(nv.INTMS) == 0
    nvme.write32(nv.INTMS, 0x00000005)
    nvme.write32(nv.INTMS, 0x00000100)
    assert nvme.read32(nv.INTMS) == 0x105 == nvme.read32(nv.INTMC)
    nvme.write32(nv.INTMC, 0x00000004)
    assert nvme.read32(nv.INTMS) == 0x101
    nvme.write32(nv.INTMC, 0xFFFFFFFF)
    assert nvme.read32(nv.INTMC) == 0


def test_subsystem_reset_register_follows_cap(connect: Connect) -> None:
    """NSSR (3.1.4.7) does something only with the value "NVMe" and only where CAP.NSSRS is set."""
    nvme = connect()
    nvme.enable()
    nvme.write32(nv.NSSR, 0x12345678)
    assert nvme.identify(1)
    if nvme.read64(nv.CAP) >> 36 & 1 == 0:
        nvme.write32(nv.NSSR, 0x4E564D65)
        assert nvme.read32(nv.CSTS) & 3 == nv.CSTS_RDY
        assert nvme.identify(1)


def test_enable_and_disable_many_times(connect: Connect) -> None:
    nvme = connect()
    for turn in range(30):
        nvme.enable(2 + turn * 7)
        assert nvme.read32(nv.CSTS) & 3 == nv.CSTS_RDY
        assert nvme.identify(1)
        nvme.disable()
        assert nvme.read32(nv.CSTS) & 3 == 0


def test_repeated_writes_of_cc_do_not_disturb(connect: Connect) -> None:
    nvme = connect()
    nvme.enable()
    queue = nvme.create_queue_pair(1, 8)
    for _ in range(3):
        nvme.write32(nv.CC, nv.CC_ENABLE)
    assert nvme.read32(nv.CC) == nv.CC_ENABLE
    assert nvme.flush(queue, NS_512) == nv.OK


def test_shutdown_reports_complete_and_reset_clears_it(connect: Connect) -> None:
    nvme = connect()
    for kind in (1, 2):
        nvme.enable()
        assert nvme.read32(nv.CSTS) & 0xC == 0
        nvme.shutdown(kind)
        assert nvme.read32(nv.CSTS) & 0xC == 0x8
        nvme.disable()
        assert nvme.read32(nv.CSTS) & 0xC == 0


@pytest.mark.parametrize(
    "name, cc",
    [
        ("MPS beyond CAP.MPSMAX", nv.CC_ENABLE | 15 << 7),
        ("CSS reserved", nv.CC_ENABLE | 3 << 4),
        ("AMS reserved", nv.CC_ENABLE | 3 << 11),
    ],
)
def test_enable_with_an_unsupported_configuration(connect: Connect, name: str, cc: int) -> None:
    """Such a controller must not become ready silently: CFS, or never RDY; disable repairs it."""
    nvme = connect()
    nvme.enable()
    nvme.disable()
    nvme.write32(nv.CC, cc)
    assert nvme.read32(nv.CSTS) & 3 != nv.CSTS_RDY, name
    nvme.enable()
    assert nvme.identify(1)


@pytest.mark.parametrize("register", [nv.ASQ, nv.ACQ])
@pytest.mark.parametrize("address", [0, 0xFFFF_FFFF_FFFF_F000, 0x7000_0000_0000])
def test_enable_with_an_unmapped_admin_queue(connect: Connect, register: int, address: int) -> None:
    """The controller may become ready, but the first use is fatal (CSTS.CFS, 3.1.4.6); reset repairs it."""
    nvme = connect()
    nvme.enable()
    iova = nvme.sqs[0].iova
    nvme.disable()
    nvme.write64(nv.ASQ, iova)
    nvme.write64(nv.ACQ, iova + PAGE)
    nvme.write64(register, address)
    nvme.write32(nv.AQA, 0x000F000F)
    nvme.write32(nv.CC, nv.CC_ENABLE)
    if nvme.read32(nv.CSTS) & nv.CSTS_CFS == 0:
        nvme.wait_csts(nv.CSTS_RDY, nv.CSTS_RDY)
        nvme.doorbell(0, 1)
        nvme.wait_csts(nv.CSTS_CFS, nv.CSTS_CFS)
    nvme.enable()
    assert nvme.identify(1)


# --- Identify (5.17)


def test_identify_controller(nvme: Nvme, target: Target, front_end: FrontEnd) -> None:
    data = nvme.identify(1)
    assert data[4:24].decode("ascii").strip() and data[24:64].decode("ascii").strip(), "SN, MN"
    assert data[64:72].decode("ascii").strip(), "FR"
    assert data[77] != 0, "MDTS"
    assert u32(data, 80) == nvme.read32(nv.VS), "VER"
    assert bool(u16(data, 256) & 0x100) == front_end.shadow, "OACS: Doorbell Buffer Config"
    assert data[512] == 0x66 and data[513] == 0x44, "SQES, CQES"
    assert u32(data, 516) >= NS_FILE, "NN"
    assert u16(data, 520) & 0x0D == 0x0D, "ONCS: Compare, DSM, Write Zeroes"
    assert data[768:1024].rstrip(b"\0").decode() == target.nqn, "SUBNQN"
    assert data[111] == 1, "CNTRLTYPE: I/O controller"
    assert u16(data, 514) >= 0 and data[525] & 1 in (0, 1)


def test_identify_namespaces(nvme: Nvme) -> None:
    sizes = {
        NS_512: (STANDARD_BYTES, 512),
        NS_4K: (STANDARD_BYTES, 4096),
        NS_NULL: (NULL_BYTES, 512),
        NS_FILE: (STANDARD_BYTES, 512),
    }
    for nsid, (size, block) in sizes.items():
        data = nvme.identify(0, nsid)
        assert u64(data, 0) == size // block, "NSZE"
        assert u64(data, 8) == size // block, "NCAP"
        assert u64(data, 16) <= size // block, "NUSE"
        assert data[25] >= (data[26] & 0xF), "NLBAF (0's based) covers FLBAS"
        lbaf = u32(data, 128 + 4 * (data[26] & 0xF))
        assert 1 << (lbaf >> 16 & 0xFF) == block, "LBADS of the format in use"
        assert lbaf & 0xFFFF == 0, "no metadata"


def test_identifiers_are_unique_and_stable(connect: Connect) -> None:
    """NGUID, EUI64, serial and the descriptors (5.17.2.3): the same after resets and reconnection."""
    seen = []
    for _ in range(2):
        nvme = connect()
        nvme.enable()
        for _ in range(2):
            rows = []
            for nsid in ALL_NAMESPACES:
                data = nvme.identify(0, nsid)
                rows.append((data[104:120], data[120:128], nvme.identify(3, nsid)))
            seen.append((nvme.identify(1)[4:24], tuple(rows)))
            nvme.enable()
        nvme.close()
    assert len(set(seen)) == 1
    rows = list(seen[0][1])
    assert len({row[0] for row in rows}) == len(rows), "NGUIDs differ between namespaces"
    assert all(any(row[0]) for row in rows), "NGUID is set"


def test_namespace_identification_descriptors(nvme: Nvme) -> None:
    lengths = {1: 8, 2: 16, 3: 16, 4: 1}
    for nsid in ALL_NAMESPACES:
        data, at, found = nvme.identify(3, nsid), 0, {}
        while at + 4 <= PAGE and data[at + 1]:
            kind, length = data[at], data[at + 1]
            assert lengths[kind] == length, "NIDL"
            found[kind] = data[at + 4 : at + 4 + length]
            at += 4 + length
        assert found, "at least one identifier"
        namespace = nvme.identify(0, nsid)
        assert found.get(2, namespace[104:120]) == namespace[104:120], "NGUID"
        assert found.get(1, namespace[120:128]) == namespace[120:128], "EUI64"


def test_active_namespace_list(nvme: Nvme) -> None:
    def listed(after: int) -> list[int]:
        return [nsid for (nsid,) in struct.iter_unpack("<I", nvme.identify(2, after)) if nsid]

    assert listed(0) == ALL_NAMESPACES
    assert listed(2) == [3, 4]
    assert listed(4) == []
    for nsid in (0xFFFFFFFE, 0xFFFFFFFF):
        with pytest.raises(NvmeError) as caught:
            nvme.identify(2, nsid)
        assert caught.value.status == nv.INVALID_NAMESPACE


def test_identify_errors(nvme: Nvme) -> None:
    count = u32(nvme.identify(1), 516)
    for cns, nsid, expected in (
        (0, 0, {nv.INVALID_NAMESPACE}),
        (0, count + 1, {nv.INVALID_NAMESPACE}),
        (0, 0xFFFFFFFE, {nv.INVALID_NAMESPACE}),
        (3, 0, {nv.INVALID_NAMESPACE}),
        (3, count + 1, {nv.INVALID_NAMESPACE}),
        (0xFF, 0, {nv.INVALID_FIELD}),
        (0x55, 0, {nv.INVALID_FIELD}),
    ):
        with pytest.raises(NvmeError) as caught:
            nvme.identify(cns, nsid)
        assert caught.value.status in expected, f"CNS {cns:#x} NSID {nsid:#x}"
    if count > NS_FILE:
        assert nvme.identify(0, count) == bytes(PAGE), "an inactive namespace is all zero"


def test_identify_with_bad_pointers(nvme: Nvme) -> None:
    hole = nvme.ram.windows[0][0] + nvme.ram.windows[0][2]
    base = nvme.ram.alloc(2 * PAGE)
    for prp1, prp2, expected in (
        (hole, 0, {nv.DATA_TRANSFER_ERROR, nv.INVALID_FIELD}),
        (base + 512, hole, {nv.DATA_TRANSFER_ERROR, nv.INVALID_FIELD}),
        (base + 512, base + PAGE + 8, {nv.PRP_OFFSET_INVALID}),
    ):
        status = nvme.try_admin(nv.IDENTIFY, prp1=prp1, prp2=prp2, cdw=[1]).status
        assert status in expected, f"{prp1:#x} {prp2:#x}: {status:#x}"


def test_identify_into_two_pages(nvme: Nvme) -> None:
    whole = nvme.identify(1)
    base = nvme.ram.alloc(3 * PAGE)
    for offset in (4, 2048, 4092):
        nvme.ram.view(base, 3 * PAGE)[:] = bytes(3 * PAGE)
        nvme.admin(nv.IDENTIFY, prp1=base + offset, prp2=base + PAGE, cdw=[1])
        assert bytes(nvme.ram.view(base + offset, PAGE)) == whole
        assert bytes(nvme.ram.view(base, offset)) == bytes(offset)
        tail = base + offset + PAGE
        assert bytes(nvme.ram.view(tail, 3 * PAGE - offset - PAGE)) == bytes(2 * PAGE - offset)


# --- queues


def test_create_completion_queue_errors(nvme: Nvme) -> None:
    """Create I/O Completion Queue (5.4)."""
    base = nvme.ram.alloc(16 * PAGE)
    mqes = nvme.read64(nv.CAP) & 0xFFFF
    granted = nvme.get_feature(7)
    beyond = (granted >> 16) + 2  # NCQA is 0's based
    cases = [
        ("identifier 0", [0 | 15 << 16, 1], base, {nv.INVALID_QID}),
        ("identifier beyond those granted", [beyond | 15 << 16, 1], base, {nv.INVALID_QID}),
        ("identifier FFFFh", [0xFFFF | 15 << 16, 1], base, {nv.INVALID_QID}),
        ("size 0", [1, 1], base, {nv.INVALID_QSIZE}),
        ("not contiguous though CQR", [1 | 15 << 16, 0], base, {nv.INVALID_FIELD}),
        ("vector", [1 | 15 << 16, 3 | 2000 << 16], base, {nv.INVALID_VECTOR}),
        ("address within a page", [1 | 15 << 16, 1], base + 8, {nv.PRP_OFFSET_INVALID, nv.INVALID_FIELD}),
        ("address not mapped", [1 | 15 << 16, 1], 0, {nv.DATA_TRANSFER_ERROR, nv.INVALID_FIELD}),
    ]
    if mqes < 0xFFFF:
        cases.append(("size beyond MQES", [1 | (mqes + 1) << 16, 1], base, {nv.INVALID_QSIZE}))
    for name, cdw, prp1, expected in cases:
        status = nvme.try_admin(nv.CREATE_CQ, prp1=prp1, cdw=cdw).status
        assert status in expected, f"{name}: {status:#x}"
    nvme.create_cq(1, 16)
    assert nvme.try_admin(nv.CREATE_CQ, prp1=base, cdw=[1 | 15 << 16, 1]).status == nv.INVALID_QID


def test_create_submission_queue_errors(nvme: Nvme) -> None:
    """Create I/O Submission Queue (5.5)."""
    nvme.create_cq(1, 16)
    base = nvme.ram.alloc(16 * PAGE)
    mqes = nvme.read64(nv.CAP) & 0xFFFF
    beyond = (nvme.get_feature(7) & 0xFFFF) + 2
    cases = [
        ("identifier 0", [0 | 15 << 16, 1 | 1 << 16], base, {nv.INVALID_QID}),
        ("identifier beyond", [beyond | 15 << 16, 1 | 1 << 16], base, {nv.INVALID_QID}),
        ("size 0", [1, 1 | 1 << 16], base, {nv.INVALID_QSIZE}),
        ("completion queue 0", [1 | 15 << 16, 1], base, {nv.INVALID_QID, nv.CQ_INVALID}),
        ("completion queue absent", [1 | 15 << 16, 1 | 2 << 16], base, {nv.CQ_INVALID}),
        ("completion queue beyond", [1 | 15 << 16, 1 | 0xFFFF << 16], base, {nv.INVALID_QID, nv.CQ_INVALID}),
        ("not contiguous though CQR", [1 | 15 << 16, 0 | 1 << 16], base, {nv.INVALID_FIELD}),
        ("address within a page", [1 | 15 << 16, 1 | 1 << 16], base + 64, {nv.PRP_OFFSET_INVALID, nv.INVALID_FIELD}),
        ("address not mapped", [1 | 15 << 16, 1 | 1 << 16], 0, {nv.DATA_TRANSFER_ERROR, nv.INVALID_FIELD}),
    ]
    if mqes < 0xFFFF:
        cases.append(("size beyond MQES", [1 | (mqes + 1) << 16, 1 | 1 << 16], base, {nv.INVALID_QSIZE}))
    for name, cdw, prp1, expected in cases:
        status = nvme.try_admin(nv.CREATE_SQ, prp1=prp1, cdw=cdw).status
        assert status in expected, f"{name}: {status:#x}"
    queue = nvme.create_sq(1, 16, nvme.cqs[1])
    assert nvme.try_admin(nv.CREATE_SQ, prp1=base, cdw=[1 | 15 << 16, 1 | 1 << 16]).status == nv.INVALID_QID
    assert nvme.flush(queue, NS_512) == nv.OK


def test_delete_queue_errors(nvme: Nvme) -> None:
    for opcode in (nv.DELETE_SQ, nv.DELETE_CQ):
        for qid in (0, 1, 64, 0xFFFF):
            assert nvme.try_admin(opcode, cdw=[qid]).status == nv.INVALID_QID
    queue = nvme.create_queue_pair(1, 16)
    assert nvme.try_admin(nv.DELETE_CQ, cdw=[1]).status == nv.INVALID_QUEUE_DELETION
    nvme.delete_sq(queue)
    assert nvme.try_admin(nv.DELETE_SQ, cdw=[1]).status == nv.INVALID_QID
    nvme.delete_cq(queue.cq)
    assert nvme.try_admin(nv.DELETE_CQ, cdw=[1]).status == nv.INVALID_QID


def test_admin_queue_wraps_and_takes_a_full_queue(connect: Connect) -> None:
    for entries in (2, 3, 32):
        nvme = connect()
        nvme.enable(entries)
        page = nvme.ram.alloc(PAGE)
        for _ in range(5):
            commands = [
                nvme.submit(nvme.sqs[0], nv.IDENTIFY, prp1=page, cdw=[1], ring=False) for _ in range(entries - 1)
            ]
            nvme.ring_sq(nvme.sqs[0])
            assert {completion.status for completion in nvme.wait(*commands)} == {nv.OK}
        nvme.close()


# --- features (5.27, 5.15)


def test_number_of_queues(nvme: Nvme) -> None:
    granted = nvme.set_feature(7, 3 << 16 | 3)
    assert granted & 0xFFFF >= 3 and granted >> 16 >= 3
    assert nvme.get_feature(7) == granted
    for value in (0xFFFF, 0xFFFF0000):
        assert nvme.try_admin(nv.SET_FEATURES, cdw=[7, value]).status == nv.INVALID_FIELD
    nvme.create_queue_pair(1, 8)
    assert nvme.try_admin(nv.SET_FEATURES, cdw=[7, 1 << 16 | 1]).status == nv.SEQUENCE_ERROR


@pytest.mark.parametrize(
    "fid, value, nsid",
    [
        (0x01, 0x0403_0203, 0),
        (0x04, 0x0000_0155, 0),
        (0x05, 0x0000_0010, NS_512),
        (0x06, 0, 0),
        (0x0B, 0x0000_011F, 0),
    ],
)
def test_features_keep_what_is_set(nvme: Nvme, fid: int, value: int, nsid: int) -> None:
    """Arbitration, temperature threshold, error recovery, write cache, events: kept, or said to be fixed."""
    before = nvme.get_feature(fid, nsid=nsid)
    changeable = nvme.get_feature(fid, nsid=nsid, select_=3) & 4
    status = nvme.try_admin(nv.SET_FEATURES, nsid=nsid, cdw=[fid, value]).status
    assert status == (nv.OK if changeable else nv.NOT_CHANGEABLE)
    assert nvme.get_feature(fid, nsid=nsid) == (value if changeable else before)
    nvme.enable()
    assert nvme.get_feature(fid, nsid=nsid) == before, "a controller reset restores the default"


@pytest.mark.parametrize("fid", [0x01, 0x02, 0x04, 0x05, 0x06, 0x07, 0x08, 0x09, 0x0A, 0x0B])
def test_mandatory_features_are_readable(nvme: Nvme, fid: int) -> None:
    """Current, default and supported capabilities (SEL 0, 1, 3)."""
    nsid = NS_512 if fid == 0x05 else 0  # error recovery is of a namespace
    for select in (0, 1, 3):
        completion = nvme.try_admin(nv.GET_FEATURES, nsid=nsid, cdw=[fid | select << 8, 0])
        assert completion.status == nv.OK, f"SEL {select}"
    capabilities = nvme.get_feature(fid, nsid=nsid, select_=3)
    value = nvme.get_feature(fid, nsid=nsid)
    saved = nvme.try_admin(nv.SET_FEATURES, nsid=nsid, cdw=[fid | 1 << 31, value]).status
    if capabilities & 1 == 0:
        assert saved == nv.NOT_SAVEABLE


def test_interrupt_features_check_the_vector(nvme: Nvme) -> None:
    last = len(nvme.eventfds) - 1
    assert nvme.get_feature(0x09, cdw11=last) & 0xFFFF == last
    assert nvme.try_admin(nv.GET_FEATURES, cdw=[0x09, 5000]).status in (nv.INVALID_FIELD, nv.INVALID_VECTOR)


@pytest.mark.parametrize("fid", [0x00, 0x7F, 0xFF])
def test_unknown_features(nvme: Nvme, fid: int) -> None:
    assert nvme.try_admin(nv.GET_FEATURES, cdw=[fid]).status == nv.INVALID_FIELD
    assert nvme.try_admin(nv.SET_FEATURES, cdw=[fid, 0]).status == nv.INVALID_FIELD


# --- logs (5.16)


def test_error_log_names_the_command(nvme: Nvme) -> None:
    queue = nvme.create_queue_pair(1, 8)
    before = nvme.get_log(SMART_LOG, 512)
    completion = nvme.execute(queue, nv.READ, nsid=NS_512, prp1=nvme.ram.alloc(PAGE), cdw=[0, 1 << 8, 0], cid=0x77)
    assert completion.status == nv.LBA_OUT_OF_RANGE
    entry = nvme.get_log(ERROR_LOG, 64)
    assert u64(entry, 0) == u64(before, 176) + 1, "error count: goes on over connections"
    assert u16(entry, 8) == 1 and u16(entry, 10) == 0x77, "SQID, CID"
    assert u16(entry, 12) >> 1 & 0x7FF == nv.LBA_OUT_OF_RANGE, "status field"
    assert u64(entry, 16) == 1 << 40, "LBA"
    assert u32(entry, 24) == NS_512, "NSID"


def test_error_log_is_newest_first_and_bounded(nvme: Nvme) -> None:
    entries = nvme.identify(1)[262] + 1  # ELPE is 0's based
    for _ in range(entries + 5):
        assert nvme.try_admin(0x3F).status == nv.INVALID_OPCODE
    log = nvme.get_log(ERROR_LOG, 64 * entries)
    counts = [u64(log, 64 * n) for n in range(entries)]
    assert counts == list(range(counts[0], counts[0] - entries, -1))


def test_smart_log_counts(nvme: Nvme) -> None:
    queue = nvme.create_queue_pair(1, 8)
    before = nvme.get_log(SMART_LOG, 512)
    for _ in range(20):
        nvme.write(queue, NS_512, 0, bytes(128 * 512))
        nvme.read(queue, NS_512, 0, 128 * 512)
    after = nvme.get_log(SMART_LOG, 512)
    assert u64(after, 64) - u64(before, 64) == 20, "host read commands"
    assert u64(after, 80) - u64(before, 80) == 20, "host write commands"
    for offset in (32, 48):
        units = u64(after, offset) - u64(before, offset)
        assert 2 <= units <= 4, "data units are thousands of 512 bytes, rounded up"
    assert 0 < u16(after, 1) < 400, "composite temperature in Kelvin"
    assert after[0] == 0, "no critical warning"


def test_firmware_effects_and_changed_namespace_logs(nvme: Nvme, front_end: FrontEnd) -> None:
    firmware = nvme.get_log(FIRMWARE_LOG, 512)
    assert firmware[0] & 7 >= 1, "active slot"
    assert firmware[8:16] == nvme.identify(1)[64:72], "FRS1 is FR"
    effects = nvme.get_log(EFFECTS_LOG, 4096)
    for opcode in (nv.IDENTIFY, nv.GET_LOG, nv.CREATE_CQ, nv.CREATE_SQ, nv.SET_FEATURES, nv.AER):
        assert u32(effects, 4 * opcode) & 1, f"admin opcode {opcode:#x} supported"
    assert u32(effects, 4 * nv.DBBUF_CONFIG) & 1 == front_end.shadow
    for opcode in (nv.READ, nv.WRITE, nv.FLUSH, nv.COMPARE, nv.WRITE_ZEROES, nv.DSM):
        assert u32(effects, 1024 + 4 * opcode) & 1, f"I/O opcode {opcode:#x} supported"
    for opcode in (nv.WRITE, nv.WRITE_ZEROES, nv.DSM):
        assert u32(effects, 1024 + 4 * opcode) & 2, f"I/O opcode {opcode:#x} changes data (LBCC)"
    assert nvme.get_log(CHANGED_NAMESPACES_LOG, 4096) == bytes(4096)


def test_log_offsets_and_errors(nvme: Nvme) -> None:
    for offset in (4, 64, 256):
        assert nvme.get_log(SMART_LOG, 4, offset=0) == nvme.get_log(SMART_LOG, 512)[:4]
        assert nvme.get_log(FIRMWARE_LOG, 4, offset=offset) == nvme.get_log(FIRMWARE_LOG, 512)[offset : offset + 4]
    page = nvme.ram.alloc(PAGE)

    def status(lid: int, offset: int = 0) -> int:
        cdw = [lid | 3 << 16, 0, offset & 0xFFFFFFFF, offset >> 32]
        return nvme.try_admin(nv.GET_LOG, nsid=0xFFFFFFFF, prp1=page, cdw=cdw).status

    for lid in (0x7E, 0xBF, 0xFF):
        assert status(lid) in (nv.INVALID_LOG_PAGE, nv.INVALID_FIELD), f"LID {lid:#x}"
    assert status(FIRMWARE_LOG, 1 << 40) == nv.INVALID_FIELD, "offset beyond the log"
    assert status(FIRMWARE_LOG, 2) == nv.INVALID_FIELD, "offset not a dword"
    hole = nvme.ram.windows[0][0] + nvme.ram.windows[0][2]
    completion = nvme.try_admin(nv.GET_LOG, nsid=0xFFFFFFFF, prp1=hole, cdw=[SMART_LOG | 127 << 16])
    assert completion.status in (nv.DATA_TRANSFER_ERROR, nv.INVALID_FIELD)


# --- Abort and asynchronous events


def test_abort_of_nothing(nvme: Nvme) -> None:
    """Abort (5.1): bit 0 of DW0 set says that nothing was aborted."""
    for sqid, cid in ((0, 0x1234), (1, 7), (64, 0xFFFF)):
        completion = nvme.abort(sqid, cid)
        if completion.status == nv.OK:
            assert completion.dw0 & 1 == 1
        else:
            assert completion.status in (nv.INVALID_FIELD, nv.INVALID_QID)


def test_abort_of_an_event_request(nvme: Nvme) -> None:
    """An aborted command ends with Command Abort Requested, the Abort with bit 0 clear; or it stays parked."""
    event = nvme.aer()
    completion = nvme.abort(0, event.cid)
    assert completion.status == nv.OK
    if completion.dw0 & 1 == 0:
        nvme.wait(event)
        assert event.status == nv.ABORTED_BY_REQUEST
    else:
        assert event.completion is None


def test_event_requests_are_parked_up_to_the_limit(nvme: Nvme) -> None:
    """Asynchronous Event Request (5.2): more than AERL + 1 outstanding ends with the limit status."""
    limit = nvme.identify(1)[259] + 1
    parked = [nvme.aer() for _ in range(limit)]
    extra = nvme.aer()
    nvme.wait(extra)
    assert extra.status == nv.AER_LIMIT
    assert nvme.identify(1)
    assert all(event.completion is None for event in parked)
    nvme.disable()
    nvme.enable()
    assert all(event.completion is None for event in parked), "a reset drops them without completion"
    again = nvme.aer()
    assert nvme.identify(1) and again.completion is None


def test_bad_doorbell_values_are_events(nvme: Nvme) -> None:
    """Asynchronous event type 0 (5.2, figure 146): 00h invalid register, 01h invalid value; log page 1."""
    nvme.create_queue_pair(1, 8)
    bad = [(2, 8, 1), (2, 0xFFFF, 1), (3, 8, 1), (2 * 40, 1, 0), (2 * 64 + 1, 1, 0)]
    if nvme.doorbells is not None:  # of a mapped page only tails of living queues are looked at all the time
        bad = bad[:2]
    for index, value, info in bad:
        event = nvme.aer()
        nvme.doorbell(index, value)
        nvme.wait(event)
        assert event.completion is not None and event.status == nv.OK
        dw0 = event.completion.dw0
        assert (dw0 & 7, dw0 >> 8 & 0xFF, dw0 >> 16 & 0xFF) == (0, info, ERROR_LOG), f"doorbell {index} = {value}"
        nvme.get_log(ERROR_LOG, 64)  # reading the log (RAE 0) lets the next such event come
    assert nvme.identify(1)


def test_events_of_one_type_wait_for_the_log_to_be_read(nvme: Nvme) -> None:
    nvme.create_queue_pair(1, 8)
    first, second = nvme.aer(), nvme.aer()
    nvme.doorbell(2, 9)
    nvme.wait(first)
    nvme.doorbell(2, 10)
    nvme.get_log(ERROR_LOG, 64, rae=1)
    assert nvme.identify(1) and second.completion is None, "masked until the log is read"
    nvme.get_log(ERROR_LOG, 64)
    if second.completion is None:  # the masked one may have been kept for now, or dropped
        nvme.doorbell(2, 11)
    nvme.wait(second)


def test_added_namespace_is_an_event_and_in_the_log(daemon: Daemon, connect: Connect) -> None:
    """Namespace Attribute Changed (type 2, 00h, log 4), then Identify and I/O work on the new one."""
    daemon.add_memory("late-0", 1 << 20)
    daemon.add_memory("late-1", 2 << 20)
    target = daemon.add_subsystem("nqn.2026-01.io.test:late", ["late-0"])
    nvme = connect(target.path)
    nvme.enable()
    nvme.set_feature(0x0B, 0x100)
    event = nvme.aer()
    daemon.rpc("nvmf_subsystem_add_ns", {"nqn": target.nqn, "namespace": {"bdev_name": "late-1", "nsid": 2}})
    nvme.wait(event)
    assert event.completion is not None
    dw0 = event.completion.dw0
    assert (dw0 & 7, dw0 >> 8 & 0xFF, dw0 >> 16 & 0xFF) == (2, 0, CHANGED_NAMESPACES_LOG)
    log = nvme.get_log(CHANGED_NAMESPACES_LOG, 4096)
    assert u32(log, 0) == 2 and u32(log, 4) == 0
    assert nvme.get_log(CHANGED_NAMESPACES_LOG, 4096) == bytes(4096), "reading clears the list"
    assert u64(nvme.identify(0, 2), 0) == (2 << 20) // 512
    queue = nvme.create_queue_pair(1, 8)
    nvme.write(queue, 2, 4000, b"new" + bytes(509))
    assert nvme.read(queue, 2, 4000, 512) == b"new" + bytes(509)


# --- other commands


def test_shadow_doorbell_pointers_are_checked(nvme: Nvme, front_end: FrontEnd) -> None:
    """Doorbell Buffer Config (5.8): both addresses are of whole pages and must be usable."""
    if not front_end.shadow:
        pytest.skip(f"no shadow doorbells with {front_end.name}")
    page = nvme.ram.alloc(2 * PAGE)
    hole = nvme.ram.windows[0][0] + nvme.ram.windows[0][2]
    bad = {nv.INVALID_FIELD, nv.DATA_TRANSFER_ERROR, nv.PRP_OFFSET_INVALID}
    for prp1, prp2 in ((page + 4, page + PAGE), (page, page + PAGE + 512), (hole, page), (page, hole), (0, 0)):
        assert nvme.try_admin(nv.DBBUF_CONFIG, prp1=prp1, prp2=prp2).status in bad, f"{prp1:#x} {prp2:#x}"
    nvme.enable_shadow_doorbells()
    queue = nvme.create_queue_pair(1, 8)
    for _ in range(20):
        assert nvme.flush(queue, NS_512) == nv.OK


def test_shadow_doorbells_after_queues_exist(nvme: Nvme, front_end: FrontEnd) -> None:
    """Linux configures them before it creates queues, others after: both must work."""
    if not front_end.shadow:
        pytest.skip(f"no shadow doorbells with {front_end.name}")
    queue = nvme.create_queue_pair(1, 8)
    assert nvme.flush(queue, NS_512) == nv.OK
    nvme.enable_shadow_doorbells()
    assert nvme.shadow is not None
    nvme.shadow[2], nvme.shadow[3] = queue.tail, queue.cq.head
    for _ in range(20):
        assert nvme.flush(queue, NS_512) == nv.OK


@pytest.mark.parametrize("opcode", [0x03, 0x07, 0x10, 0x11, 0x19, 0x3F, 0x81, 0x84, 0xC0, 0xFF])
def test_unsupported_admin_opcodes(nvme: Nvme, opcode: int) -> None:
    completion = nvme.try_admin(opcode, nsid=NS_512, prp1=nvme.ram.alloc(PAGE))
    assert completion.status == nv.INVALID_OPCODE
    assert nvme.identify(1)


@pytest.mark.parametrize("flags", [0x01, 0x02, 0x40, 0x80])
def test_fused_and_sgl_admin_commands_are_refused(nvme: Nvme, flags: int) -> None:
    page = nvme.ram.alloc(PAGE)
    assert nvme.try_admin(nv.IDENTIFY, prp1=page, cdw=[1], flags=flags).status == nv.INVALID_FIELD
