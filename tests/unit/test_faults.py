"""Faults: which commands are struck, against a model of a few lines; delays under a virtual clock; refusals."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Iterator
from typing import Any

import pytest

from dpu import layout
from dpu.errors import RpcError
from dpu.faults import ACTIONS, DISTRIBUTIONS, Fault
from dpu.gates import Gates
from tests.support import nvme_driver as nv
from tests.support.nvme_driver import PAGE
from tests.unit.asic_lab import ENGINES, NS_MEMORY, PRODUCT, GuestSq, Kept, Lab
from tests.unit.test_gate import Clock, limited, next_due

ZEROES = 0x08


@pytest.fixture
def gates() -> Iterator[Gates]:
    made = Gates.create()
    yield made
    made.close()


def fault(action: str, number: int = 1, **more: Any) -> Fault:
    one = Fault(f"f{number}", action, "memory", number=number, serial=number, **more)
    one.check()
    return one


def run_until_idle(lab: Lab, clock: Clock, queue: GuestSq) -> dict[int, tuple[int, int]]:
    """CID -> (status, time)."""
    found: dict[int, tuple[int, int]] = {}
    while True:
        lab.settle()
        found |= {one.cid: (one.status, clock.now) for one in queue.cq.reap()}
        due = next_due(lab)
        if due is None:
            return found
        clock.word[0] = max(due, clock.now)


def model(rules: list[Fault], op: str, first: int, last: int, seen: dict[str, int], struck: dict[str, int]) -> str:
    """The name of the fault that strikes a command; probabilities are 1."""
    for one in rules:
        types = one.io_types or ACTIONS[one.action].io_types
        ranged = op in ("read", "write", "write_zeroes", "compare")
        if op not in types and "all" not in types:
            continue
        end = one.lba + (one.num_blocks or 1 << 60)
        if (one.lba or one.num_blocks) and not (ranged and first < end and last >= one.lba):
            continue
        n = seen[one.name]
        seen[one.name] += 1
        if n >= one.after and (n - one.after) % one.every == 0 and (not one.num or struck[one.name] < one.num):
            struck[one.name] += 1
            return one.name
    return ""


@pytest.mark.parametrize("engine", ["product", "plain"])
def test_who_is_struck(gates: Gates, engine: str) -> None:
    dice = random.Random(9)
    opcodes = {"read": nv.READ, "write": nv.WRITE, "write_zeroes": ZEROES, "flush": nv.FLUSH}
    for _ in range(10 if engine == "product" else 2):
        rules = [
            fault(
                "status",
                number,
                sc=number,
                io_types=tuple(dice.sample([*opcodes, "all"], dice.randint(1, 3))),
                lba=dice.choice([0, dice.randrange(64)]),
                num_blocks=dice.choice([0, 1, 30]),
                after=dice.choice([0, 1, 5]),
                every=dice.choice([1, 1, 3]),
                num=dice.choice([0, 1, 4]),
            )
            for number in range(1, 5)
        ]
        seen, struck = ({one.name: 0 for one in rules} for _ in range(2))
        with Kept() as kept:
            clock = Clock()
            gates.clear(0)
            for one in rules:
                gates.rule(one.number).live = 0
            gates.set_rules(0, rules)
            lab = limited(kept, ENGINES[engine], gates, clock)
            queue = lab.open_pair(1, 64)
            lab.begin()
            page = kept.ram.buffer(PAGE)
            for _ in range(60):
                op, first, blocks = dice.choice(list(opcodes)), dice.randrange(80), dice.randint(1, 8)
                want = model(rules, op, first, first + blocks - 1, seen, struck)
                if op == "flush":
                    queue.submit(nv.FLUSH, nsid=NS_MEMORY)
                else:
                    queue.io(opcodes[op], first, blocks, page.iova)
                queue.ring()
                ((status, _),) = run_until_idle(lab, clock, queue).values()
                assert status == (int(want[1:]) if want else 0), (op, first, blocks, rules)
            for one in rules:
                row = gates.rule(one.number)
                assert (int(row.matches), int(row.struck)) == (seen[one.name], struck[one.name])
            lab.close()


def strikes(gates: Gates, one: Fault, count: int) -> list[bool]:
    with Kept() as kept:
        clock = Clock()
        gates.rule(one.number).live = 0
        gates.clear(0)
        gates.set_rules(0, [one])
        lab = limited(kept, PRODUCT, gates, clock)
        queue = lab.open_pair(1, 64)
        lab.begin()
        page = kept.ram.buffer(PAGE)
        found = []
        for _ in range(count):
            queue.io(nv.READ, 0, 1, page.iova)
            queue.ring()
            lab.settle()
            found += [done.status != 0 for done in queue.cq.reap()]
        lab.close()
    return found


def test_dice_are_repeated_by_their_seed_and_fair(gates: Gates) -> None:
    one = fault("status", probability=0.25, seed=3)
    first = strikes(gates, one, 2000)
    assert strikes(gates, one, 2000) == first
    assert 420 < sum(first) < 580  # 500 +- 4 standard deviations
    assert strikes(gates, fault("status", probability=0.25, seed=4), 2000) != first
    assert not any(strikes(gates, fault("status", probability=1e-9), 200))


def test_a_fixed_delay_is_to_the_tick_and_statuses_come_after_it(gates: Gates) -> None:
    with Kept() as kept:
        clock = Clock()
        gates.set_rules(0, [fault("delay", 1, io_types=("read",), latency_us=50), fault("full", 2, latency_us=7)])
        lab = limited(kept, PRODUCT, gates, clock)
        queue = lab.open_pair(1, 64)
        lab.begin()
        page, begin = kept.ram.buffer(PAGE), clock.now
        queue.io(nv.READ, 0, 1, page.iova)
        queue.io(nv.WRITE, 0, 1, page.iova)
        queue.submit(nv.FLUSH, nsid=NS_MEMORY)
        queue.ring()
        done = run_until_idle(lab, clock, queue)
        scale = 1_000_000_000 / gates_rate()
        assert done[2] == (0, begin)
        assert done[1][0] == 0x81 and done[1][1] - begin == pytest.approx(7_000 / scale, abs=2)
        assert done[0][0] == 0 and done[0][1] - begin == pytest.approx(50_000 / scale, abs=2)
        lab.close()


def gates_rate() -> int:
    from dpu.fastpath.poller import tick_rate

    return tick_rate()


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_delays_are_distributed_as_they_are_called(gates: Gates, distribution: str) -> None:
    """Mean, median and 99th percentile of 2000 drawn delays against the distribution's own formulas."""
    one = fault("delay", latency_us=100, spread_us=1000, distribution=distribution, seed=5)
    with Kept() as kept:
        clock = Clock()
        gates.set_rules(0, [one])
        lab = limited(kept, PRODUCT, gates, clock)
        queue = lab.open_pair(1, 64)
        lab.begin()
        page, spent = kept.ram.buffer(PAGE), []
        for _ in range(2000):
            begin = clock.now
            queue.io(nv.READ, 0, 1, page.iova)
            queue.ring()
            ((_, at),) = run_until_idle(lab, clock, queue).values()
            spent.append((at - begin) * 1e6 / gates_rate())
        lab.close()
    spent.sort()
    mean, median, p99 = statistics.mean(spent), spent[1000], spent[1980]
    want = {
        "fixed": (100, 100, 100),
        "uniform": (550, 550, 991),
        "exponential": (100, 69.3, 460.5),
        "lognormal": (163.2, 100, 1000),  # exp(sigma^2 / 2) times the median, sigma = ln 10 / 2.326
        "two_point": (109, 100, 1000),
    }[distribution]
    assert mean == pytest.approx(want[0], rel=0.08)
    assert median == pytest.approx(want[1], rel=0.1)
    if distribution != "two_point":  # it steps just there
        assert p99 == pytest.approx(want[2], rel=0.25)


def test_what_is_held_goes_when_it_is_released_and_counts_once_over_a_death(gates: Gates) -> None:
    with Kept() as kept:
        clock = Clock()
        rules = [fault("hold", 1, io_types=("read",), after=1), fault("delay", 2, latency_us=1000)]
        gates.set_rules(0, rules)
        lab = limited(kept, PRODUCT, gates, clock)
        queue = lab.open_pair(1, 64)
        lab.begin()
        page = kept.ram.buffer(PAGE)
        queue.io(nv.READ, 0, 1, page.iova)
        for op in (nv.READ, nv.READ, nv.WRITE):
            queue.io(op, 0, 1, page.iova)
        queue.ring()
        lab.settle()
        begin = clock.now
        lab.close()
        clock.word[0] += 1000
        last = limited(kept, PRODUCT, gates, clock)
        last.recover()
        gates.set_rules(0, rules)  # as a new worker does it: what is there stays
        done = run_until_idle(last, clock, queue)
        assert sorted(done) == [0, 3], "held ones are held again"
        assert done[3][1] - begin == pytest.approx(gates_rate() // 1000, abs=2), "the delay goes on, not from anew"
        assert int(gates.rule(1).matches) == 3 and int(gates.rule(1).struck) == 2
        assert asyncio.run(last.plane.release(1)) == 2
        assert sorted(run_until_idle(last, clock, queue)) == [1, 2]
        queue.io(nv.READ, 0, 1, page.iova)
        queue.ring()
        assert run_until_idle(last, clock, queue) == {}, "the rule is still there"
        gates.set_rules(0, rules[1:])
        assert asyncio.run(last.plane.release(1)) == 1
        assert len(run_until_idle(last, clock, queue)) == 1
        queue.io(nv.READ, 0, 1, page.iova)
        queue.ring()
        assert len(run_until_idle(last, clock, queue)) == 1
        last.close()


def test_rules_come_and_go_without_a_loop(gates: Gates) -> None:
    dice = random.Random(2)
    there: list[Fault] = []
    for serial in range(1, 200):
        if there and dice.random() < 0.5:
            there.remove(dice.choice(there))
        else:
            there.append(Fault("f", "status", "m", number=(serial - 1) % 20 + 1, serial=serial))
            there = [one for one in there if one is there[-1] or one.number != there[-1].number]
        gates.set_rules(3, there)
        walked, at = [], int(gates.record(3).rules)
        while at:
            walked.append(at)
            assert gates.rule(at).live and len(walked) <= len(there)
            at = int(gates.rule(at).following)
        assert walked == [one.number for one in there]
        assert [int(gates.rule(n).serial) for n in walked] == [one.serial for one in there]


@pytest.mark.parametrize(
    ("action", "more"),
    [
        ("bogus", {}),
        ("status", {"every": 0}),
        ("status", {"probability": 0.0}),
        ("status", {"probability": 1.5}),
        ("status", {"io_types": ("read", "reed")}),
        ("status", {"sc": 256}),
        ("status", {"method": "bdev_get_bdevs"}),
        ("delay", {}),
        ("delay", {"latency_us": 5, "distribution": "normal"}),
        ("delay", {"latency_us": 5, "distribution": "uniform"}),
        ("delay", {"latency_us": 4_000_000_000}),
    ],
)
def test_what_cannot_be_done_is_refused(action: str, more: dict[str, Any]) -> None:
    with pytest.raises(RpcError) as refused:
        Fault("f", action, "memory", **more).check()
    assert refused.value.code == -22


def test_corrupted_and_torn_data() -> None:
    data = bytes(range(256)) * 16
    one = fault("corrupt", corrupt_offset=5, corrupt_value=0xFF).mishap(0, 512).change(data)
    assert [i for i in range(4096) if one[i] != data[i]] == [5] and one[5] == data[5] ^ 0xFF
    wild = fault("corrupt", corrupt_bytes=0, seed=1)
    assert all(a != b for a, b in zip(wild.mishap(7, 512).change(data), data))
    assert wild.mishap(7, 512).change(data) == wild.mishap(7, 512).change(data) != wild.mishap(8, 512).change(data)
    lengths = {len(fault("torn", seed=2).mishap(n, 512).change(data)) for n in range(100)}
    assert lengths == {512 * n for n in range(8)}
    assert len(fault("torn", torn_blocks=3).mishap(0, 512).change(data)) == 1536
    assert fault("torn", sct=2, sc=0x80).mishap(0, 512).status == 0x280
    assert layout.RULES > 100
