"""Controllers with MSI instead of MSI-X: what PCI space says, one vector for all queues, INTMS and INTMC."""

from __future__ import annotations

import select
from collections.abc import Callable

import pytest

from tests.support import front_ends
from tests.support import nvme_driver as nv
from tests.support.daemon import NS_512
from tests.support.front_ends import FrontEnd
from tests.support.nvme_driver import Nvme
from tests.support.vfio_user_client import MSI_INDEX, MSIX_INDEX

Connect = Callable[..., Nvme]


@pytest.fixture(scope="module")
def front_end() -> FrontEnd:
    return front_ends.MSI


def test_it_has_msi_and_no_msix(connect: Connect) -> None:
    nvme = connect()
    assert nvme.find_capability(0x05) and nvme.find_capability(0x10) and not nvme.find_capability(0x11)
    assert nvme.client.irq_info(MSI_INDEX) == (1, 1) and nvme.client.irq_info(MSIX_INDEX)[1] == 0
    assert [region.size for region in nvme.regions[1:6]] == [0] * 5, "no table, no pending bits"


def test_all_queues_share_the_vector(connect: Connect) -> None:
    nvme = connect()
    nvme.enable()
    queues = [nvme.create_queue_pair(qid, 8) for qid in (1, 2, 3)]
    for queue in queues:
        nvme.write(queue, NS_512, queue.qid, bytes([queue.qid]) * 512)
    assert [nvme.read(queues[0], NS_512, qid, 512)[0] for qid in (1, 2, 3)] == [1, 2, 3]
    completion = nvme.try_admin(nv.CREATE_CQ, prp1=nvme.ram.alloc(4096), cdw=[4 | 7 << 16, 3 | 1 << 16])
    assert completion.status == nv.INVALID_VECTOR


def test_masked_interrupts_come_when_they_are_unmasked(connect: Connect) -> None:
    """Base 3.1.3.3 and .4: with MSI the host may mask a vector; what came meanwhile is told afterwards."""
    nvme = connect()
    nvme.enable()
    queue = nvme.create_queue_pair(1, 8)
    nvme.write32(nv.INTMS, 1)
    nvme.drain(0)
    commands = [nvme.submit(queue, nv.FLUSH, nsid=NS_512) for _ in range(3)]
    while not all(command.completion for command in commands):
        nvme.read32(nv.CSTS)
        nvme.reap(queue.cq)
    assert nvme.read32(nv.INTMC) == 1 and not nvme.drain(0)
    nvme.write32(nv.INTMC, 1)
    assert select.select([nvme.eventfds[0]], [], [], nv.DEADLINE_S)[0]
    nvme.drain(0)
    nvme.wait(nvme.submit(queue, nv.FLUSH, nsid=NS_512))
