"""Time per command of the compiled asic stage against the same work in C (baseline.c), in one process.

    scripts/bench/fastpath [--quick] [--rounds N] [--case NAME ...]

The guest's side (baseline.c: drive) is compiled C for both: it fills the queues, rings, times one pass by the time
stamp counter, takes the completions, rings. Both work on the same records, so nothing differs but the compiler and
the source. Rounds alternate between the two; of each round the median pass counts, less an empty pass; the ratio is
the median over rounds of neighbours' ratios. gcc is needed by this benchmark only.

Beside that, what controllers without work cost the commands of another one, when they are quiet (DPU_EMU_QUIET_US)
and when each pass looks at them: the mean of all passes but the slowest hundredth.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import os
import random
import statistics
import subprocess
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpu import jitcache

os.environ.setdefault("NUMBA_CACHE_DIR", str(jitcache.directory()[0]))

import numba
import numpy as np

from dpu import layout
from dpu.backends import MemoryBackend, NullBackend
from dpu.fastpath import asic
from dpu.fastpath.atomics import view
from dpu.fastpath.poller import Poller
from dpu.fastpath.uring import NoRing
from dpu.guestmap import Mapping
from dpu.layout import POLLER
from dpu.plane import Plane
from scripts.bench import common

HERE = Path(__file__).parent
READ, WRITE = 2, 1
PAGE = layout.PAGE
ENTRIES = 256  # of every queue; a multiple of every depth, so that command identifiers follow each other
NS_BYTES = 256 << 20
BLOCK = 512
REGIONS = 8  # of the DMA map
BUDGET = 1.15
# label, stamps, counters, trace on: what each costs is the difference to the first. (What the trace costs while it is
# off is the difference of two revisions: see BENCHMARKING.md.)
SWITCHES = (("stamps", 1, 1, 0), ("no stamps", 0, 1, 0), ("no counters", 0, 0, 0), ("traced", 1, 1, 1))
BUDGET_CASES = ("1x32 read 4k", "1x32 write 4k")
BESIDE = (7, 31)  # controllers without work
NEVER_QUIET = 1 << 62


@dataclass(frozen=True)
class Case:
    """``footprint``: bytes of the namespace that are used. ``scattered``: neighbours' buffers in other regions."""

    name: str
    queues: int
    depth: int
    opcode: int
    size: int
    footprint: int
    interrupts: bool = True
    scattered: bool = False
    null: bool = False


HOT, MEDIUM = 256 << 10, 8 << 20
CASES = [
    Case("1x1 read 4k", 1, 1, READ, 4096, HOT),
    Case("1x1 write 4k", 1, 1, WRITE, 4096, HOT),
    Case("1x32 read 4k", 1, 32, READ, 4096, HOT),
    Case("1x32 write 4k", 1, 32, WRITE, 4096, HOT),
    Case("4x32 read 4k", 4, 32, READ, 4096, HOT),
    Case("4x32 write 4k", 4, 32, WRITE, 4096, HOT),
    Case("16x128 read 4k", 16, 128, READ, 4096, HOT),
    Case("16x128 write 4k", 16, 128, WRITE, 4096, HOT),
    Case("1x32 read 128k", 1, 32, READ, 128 << 10, MEDIUM),
    Case("1x32 write 128k", 1, 32, WRITE, 128 << 10, MEDIUM),
    Case("1x32 read 4k, 256 MiB", 1, 32, READ, 4096, NS_BYTES),
    Case("1x32 write 4k, 256 MiB", 1, 32, WRITE, 4096, NS_BYTES),
    Case("1x32 read 4k, no interrupt", 1, 32, READ, 4096, HOT, interrupts=False),
    Case("1x1 read 4k, no interrupt", 1, 1, READ, 4096, HOT, interrupts=False),
    Case("1x32 read 4k, scattered", 1, 32, READ, 4096, HOT, scattered=True),
    Case("1x32 read 4k, null", 1, 32, READ, 4096, HOT, null=True),
    Case("1x32 read 128k, null", 1, 32, READ, 128 << 10, MEDIUM, null=True),
]


# ------------------------------------------------------------------------------------------------------ C's side

_NUMBER = {"i8": "int64_t", "u8": "uint64_t", "u4": "uint32_t", "u2": "uint16_t", "u1": "uint8_t", "i4": "int32_t"}


def c_struct(name: str, dtype: Any) -> str:
    """A C struct with the dtype's fields at its offsets, and the proof that they are there."""
    body, proofs, at, pads = [], [], 0, 0
    for field in dtype.names:
        kind, offset = dtype.fields[field][:2]
        base, shape = kind.subdtype or (kind, ())
        c_type = "struct SQE" if base.names else _NUMBER[base.str[1:]]
        body.append(f"    {c_type} {field}{''.join(f'[{n}]' for n in shape)};")
        proofs.append(f'_Static_assert(offsetof(struct {name}, {field}) == {offset}, "{name}.{field}");')
        at = offset + kind.itemsize
    if at < dtype.itemsize:
        body.append(f"    char pad_{pads}[{dtype.itemsize - at}];")
    proofs.append(f'_Static_assert(sizeof(struct {name}) == {dtype.itemsize}, "{name}");')
    return "\n".join([f"struct {name} {{", *body, "};", *proofs])


def c_header() -> str:
    """dpu/layout.py as C."""
    names = [
        "SQE",
        "INFLIGHT",
        "SQ",
        "CQ",
        "SPACE",
        "NAMESPACE",
        "QUEUE_LOCAL",
        "CONTROLLER",
        "POLLER",
        "URING",
        "REGION",
        "SEGMENT",
    ]
    structs = [c_struct(name, getattr(layout, name)) for name in names]
    numbers = [
        f"#define {name} {value}LL"
        for name, value in vars(layout).items()
        if name.isupper() and type(value) is int and name not in ("VERSION", "MAGIC")
    ]
    return "\n".join(["#include <stddef.h>", "#include <stdint.h>", *numbers, *structs, ""])


def build(directory: Path) -> ctypes.CDLL:
    """Compile baseline.c for this processor."""
    (directory / "layout.h").write_text(c_header())
    library = directory / "baseline.so"
    flags = ["-O3", "-march=native", "-fno-strict-aliasing", "-fwrapv", "-Wall", "-shared", "-fPIC", f"-I{directory}"]
    subprocess.run(["gcc", *flags, "-o", str(library), str(HERE / "baseline.c")], check=True)
    return load(str(library))


def load(library: str) -> ctypes.CDLL:
    """What :func:`build` has left in ``library``."""
    made = ctypes.CDLL(library)
    made.drive.restype = ctypes.c_int64
    made.drive.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    return made


class ClientQueue(ctypes.Structure):
    """struct client_queue of baseline.c."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            *("sq", "cq", "doorbells", "prp1", "prp2"),
            *(
                "qid",
                "entries",
                "tail",
                "head",
                "phase",
                "outstanding",
                "opcode",
                "nsid",
                "blocks",
                "places",
                "random",
            ),
        )
    ]


# -------------------------------------------------------------------------------------------------- numba's side


def product_pass(cache: bool = False) -> Any:
    """The product's pass, as a C function; ``cache``: kept in numba's cache, which must be one of this `dpu`."""
    return numba.cfunc("int64(int64)", cache=cache)(_one_pass)


def _one_pass(address: int) -> int:
    return asic.one_pass(view(address, 1, POLLER)[0], False)


# ------------------------------------------------------------------------------------------------------- the rig


class Rig:
    """A controller with ``case.queues`` queue pairs, driven by nobody but ``round``."""

    IOVA = 0x1_0000_0000

    def __init__(
        self,
        case: Case,
        library: ctypes.CDLL,
        backends: dict[bool, Any],
        mapping: Mapping,
        poller: Poller | None = None,
    ) -> None:
        self.case, self.library = case, library
        self._health = np.zeros(8, np.int64)
        self.poller = poller or Poller(None, int(self._health.ctypes.data), NoRing(), spin=0)
        self._own_poller = poller is None
        if self._own_poller:
            self.poller.make_trace(1 << 15)
        self._fds = [os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING) for name in ("state", "bar", "ram")]
        for fd, size in zip(self._fds, (layout.STATE_BYTES, layout.BAR_FILE_BYTES)):
            os.ftruncate(fd, size)
        self.plane = Plane(self.poller, self._fds[0], self._fds[1], -1, lambda backend: mapping.host)
        pages = case.queues * (case.depth * (case.size // PAGE + 1) // REGIONS + ENTRIES * 80 // PAGE + 8)
        self._region = pages * PAGE
        self._make_ram(self._fds[2])
        self.plane.set_namespace(1, backends[case.null])
        self.eventfds = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(case.queues + 1)]
        self.plane.set_vectors(0, self.eventfds)
        self._arrays: list[Any] = []
        self.clients = (ClientQueue * case.queues)()
        for qid in range(1, case.queues + 1):
            self._open(qid)
        self.plane.record.mapped = self.plane.record.live = 1
        self.poller.controllers_end(self.plane.index)

    def _make_ram(self, fd: int) -> None:
        """REGIONS regions with holes between them in guest addresses; file offsets follow each other."""
        total = self._region * REGIONS
        os.ftruncate(fd, total)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 2)  # F_SEAL_SHRINK
        for i in range(REGIONS):
            self.plane.adopt_dma(self.IOVA + 2 * i * self._region, self._region, 3, i * self._region, fd)
        ctypes.memset(self.plane.memory.find(self.IOVA, self._region, 1), 0xA5, total)
        self._next = [self.IOVA + 2 * i * self._region for i in range(REGIONS)]
        if not self.case.scattered:  # one large region that holds everything, as a guest's RAM is
            self._whole()

    def _whole(self) -> None:
        memory = self.plane.memory
        for i in range(REGIONS):
            memory.unmap(self.IOVA + 2 * i * self._region, self._region)
        sizes = [PAGE] * (REGIONS - 1) + [self._region * REGIONS - PAGE * (REGIONS - 1)]
        at, iova = 0, self.IOVA
        for size in sizes:
            self.plane.adopt_dma(iova, size, 3, at, self._fds[2])
            self._next = [iova]
            at, iova = at + size, iova + size + PAGE

    def _alloc(self, size: int, number: int = 0) -> int:
        which = number % len(self._next)
        iova = self._next[which]
        self._next[which] += -(-size // PAGE) * PAGE
        return iova

    def _open(self, qid: int) -> None:
        case = self.case
        cq, sq = self._alloc(ENTRIES * 16), self._alloc(ENTRIES * 64)
        self.plane.open_cq(qid, ENTRIES, cq, qid, case.interrupts, epoch=1)
        self.plane.open_sq(qid, ENTRIES, sq, qid, epoch=1)
        prps = [self._prps(qid * case.depth + i) for i in range(case.depth)]
        arrays = [np.array(column, np.int64) for column in zip(*prps)]
        self._arrays += arrays
        find = self.plane.memory.find
        client = self.clients[qid - 1]
        client.sq, client.cq, client.doorbells = (
            find(sq, 64, 1),
            find(cq, 16, 2),
            int(self.plane.doorbells.ctypes.data),
        )
        client.prp1, client.prp2 = (int(array.ctypes.data) for array in arrays)
        client.qid, client.entries, client.phase = qid, ENTRIES, 1
        client.opcode, client.nsid, client.blocks = case.opcode, 1, case.size // BLOCK
        client.places = case.footprint // case.size
        client.random = random.Random(qid).getrandbits(62) | 1

    def _prps(self, number: int) -> tuple[int, int]:
        """PRP1 and PRP2 of one buffer (Base 4.1.1)."""
        size = self.case.size
        at = self._alloc(size, number)
        if size <= PAGE:
            return at, 0
        pages = range(at + PAGE, at + size, PAGE)
        if len(pages) == 1:
            return at, pages[0]
        page = self._alloc(PAGE, number)
        host = self.plane.memory.find(page, PAGE, 3)
        (ctypes.c_int64 * len(pages)).from_address(host)[:] = list(pages)
        return at, page

    def round(self, function: int, commands: int) -> tuple[float, float]:
        """Ticks of a pass: median, mean of the fastest nine tenths."""
        times = self.times(function, commands)
        return float(np.median(times)), float(times[: max(1, len(times) * 9 // 10)].mean())

    def times(self, function: int, commands: int) -> Any:
        """Ticks of the passes that ``commands`` took, the fastest first."""
        spans = np.zeros(commands + 16, np.uint32)
        passes = self.library.drive(
            function,
            self.poller.address,
            ctypes.addressof(self.clients),
            self.case.queues,
            self.case.depth,
            commands,
            spans.ctypes.data,
        )
        assert passes > 0, f"{self.case.name}: no progress or a bad status"
        return np.sort(spans[:passes].astype(np.float64))

    @property
    def per_pass(self) -> int:
        """Commands of one pass."""
        return self.case.queues * min(self.case.depth, layout.BATCH)

    def tables(self) -> dict[str, bytes]:
        """What both sides must leave alike after the same commands (no stamps among it)."""
        sqs, cqs, spaces = self.plane.sqs, self.plane.cqs, self.plane.spaces
        names = ["commands", "errors", "bytes_read", "bytes_written", "fetched"]
        return {
            "sq": np.array([sqs[name] for name in names]).tobytes(),
            "cq": np.array([cqs[name] for name in ("posted", "signals")]).tobytes(),
            "space": np.array([spaces[name] for name in layout.SPACE.names if "ticks" not in name]).tobytes(),
            "free": np.sort(self.plane._free).tobytes(),
            "inflight": self.plane.inflight.state.tobytes(),
        }

    def close(self) -> None:
        self.plane.memory.close()
        pollers = [self.poller.control_fd, self.poller.wake_fd] if self._own_poller else []
        for fd in [*self._fds, *self.eventfds, *pollers]:
            os.close(fd)


def check(
    case: Case, library: ctypes.CDLL, backends: dict[bool, Any], mapping: Mapping, sides: dict[str, int]
) -> None:
    """The baseline does the product's work: after the same commands the same tables."""
    seen = {}
    for name, function in sides.items():
        rig = Rig(case, library, backends, mapping)
        rig.round(function, 3 * rig.per_pass + 1)
        seen[name] = rig.tables()
        rig.close()
    left, right = seen["numba"], seen["c"]
    wrong = [name for name in left if left[name] != right[name]]
    assert not wrong, f"{case.name}: baseline.c leaves other {', '.join(wrong)} than the product"


def measure(rig: Rig, sides: dict[str, int], empty: int, rounds: int, commands: int) -> dict[str, Any]:
    """Interleaved rounds of both sides; nanoseconds per command and their ratio."""
    to_ns = int(rig.poller.record.ns_mult) / (1 << 20) / rig.per_pass
    floor = rig.round(empty, 2000)[0]
    for function in sides.values():
        rig.round(function, commands // 4 + 1)
    medians: dict[str, list[float]] = {name: [] for name in sides}
    means: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        order = list(sides) if number % 2 else list(reversed(sides))
        for name in order:
            median, mean = rig.round(sides[name], commands)
            medians[name].append((median - floor) * to_ns)
            means[name].append((mean - floor) * to_ns)
    ratios = [a / b for a, b in zip(medians["numba"], medians["c"])]
    return {
        "ns": {name: common.spread(values, 1) for name, values in medians.items()},
        "ns_mean_of_fastest_90_percent": {name: round(statistics.median(v), 1) for name, v in means.items()},
        "ratio": common.spread(ratios),
        "load": common.load(),
    }


def measure_beside(
    library: ctypes.CDLL, backends: dict[bool, Any], mapping: Mapping, function: int, rounds: int, commands: int
) -> dict[str, dict[str, Any]]:
    """Ratio of a command's time with controllers beside its own to that without, by how many there are."""
    case = Case("1x1 read 4k, null, no interrupt", 1, 1, READ, 4096, HOT, interrupts=False, null=True)
    empty = _address(library.empty_pass)

    def cost(rig: Rig, quiet_ticks: int) -> float:
        rig.poller.record.quiet_ticks = quiet_ticks
        rig.round(function, 2000)  # the controllers are quiet after that
        times = rig.times(function, commands)
        return float(times[: max(1, len(times) * 99 // 100)].mean()) - rig.round(empty, 2000)[0]

    found = {}
    for beside in BESIDE:
        alone = Rig(case, library, backends, mapping)
        rig = Rig(case, library, backends, mapping)
        others = [Rig(case, library, backends, mapping, rig.poller) for _ in range(beside)]
        usual = int(rig.poller.record.quiet_ticks)
        ratios: dict[str, list[float]] = {"quiet": [], "looked at": []}
        for _ in range(rounds):
            one = cost(alone, usual)
            ratios["quiet"].append(cost(rig, usual) / one)
            ratios["looked at"].append(cost(rig, NEVER_QUIET) / one)
        found[str(beside)] = {name: common.spread(values) for name, values in ratios.items()}
        for each in (*others, rig, alone):
            each.close()
    rows = [[beside, *(row[name]["median"] for name in row)] for beside, row in found.items()]
    common.table(["controllers without work", "quiet", "looked at in each pass"], rows)
    return found


def run(arguments: argparse.Namespace) -> common.Report:
    report = common.Report("fastpath", arguments)
    cases = [case for case in CASES if not arguments.case or case.name in arguments.case]
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        library = build(Path(directory))
        compiler = subprocess.run(["gcc", "--version"], capture_output=True, text=True, check=True).stdout
        report.results["compilers"] = {"gcc": compiler.splitlines()[0], "numba": numba.__version__}
        product = product_pass()
        sides = {"numba": product.address, "c": _address(library.baseline_pass)}
        memory = MemoryBackend.create("bench", BLOCK, NS_BYTES // BLOCK, uuid.uuid4())
        backends = {False: memory, True: NullBackend("null", BLOCK, NS_BYTES // BLOCK, uuid.uuid4())}
        mapping = Mapping(memory.fd, NS_BYTES)
        ctypes.memset(mapping.host, 0x5A, NS_BYTES)
        found: dict[str, Any] = {}
        for case in cases:
            check(case, library, backends, mapping, sides)
            rig = Rig(case, library, backends, mapping)
            commands = max(arguments.bytes // max(case.size, 4096), 4 * rig.per_pass)
            row: list[Any] = [case.name]
            found[case.name] = {}
            for label, stamps, counters, traced in SWITCHES:
                rig.poller.record.stamps, rig.poller.record.counters = stamps, counters
                rig.plane.set_trace(bool(traced))
                result = measure(rig, sides, _address(library.empty_pass), arguments.rounds, commands)
                found[case.name][label] = result
                row += [result["ns"]["c"]["median"], result["ns"]["numba"]["median"], result["ratio"]["median"]]
            rows.append(row)
            print(*row, flush=True)
            rig.close()
        if not arguments.case:
            commands = min(arguments.bytes >> 12, 20_000)
            beside = measure_beside(library, backends, mapping, product.address, arguments.rounds, commands)
            report.results["beside controllers without work"] = beside
    report.results["cases"] = found
    budget = [found[name]["stamps"]["ratio"]["median"] for name in BUDGET_CASES if name in found]
    if budget:
        report.results["budget"] = {"ratio_max": BUDGET, "ratio": max(budget), "met": max(budget) <= BUDGET}
    heads = [
        "queues x depth",
        *[f"{side}, {label}" for label, *_ in SWITCHES for side in ("C", "numba", "ratio")],
    ]
    common.table(heads, rows)
    return report


def _address(function: Any) -> int:
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)


def main() -> None:
    parser = common.parser(__doc__, "fastpath")
    parser.add_argument("--rounds", type=int, default=15, help="pairs of runs of each case")
    parser.add_argument("--bytes", type=int, default=1 << 29, help="moved in each run of a round")
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES], help="only this one")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.bytes = 2, 1 << 22
    run(arguments).write()


if __name__ == "__main__":
    main()
