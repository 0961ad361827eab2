"""Packet-hops per second of the compiled simulation of queues and spray (net.sim.spray), one plane, no transport.

Budget: at least 15 million at 131,072 NICs (512-port switches). Each run is of one spray; the first one of all, which
compiles, is not counted. A hop is one queue that a packet passes; a host's own port is one.
"""

from __future__ import annotations

from net.sim.network import Stage, percentile
from net.sim.spray import SPRAYS, SpraySettings, run
from net.topology import clos
from scripts.bench import common

BUDGET_HOPS_PER_S = 15e6
RADIX, QUICK_RADIX = 512, 32


def main() -> None:
    parser = common.parser(__doc__, "spray")
    parser.add_argument("--slots", type=int, default=200, help="in which every NIC sends, at load 0.9")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    radix = QUICK_RADIX if arguments.quick else RADIX
    slots, runs = (20, 2) if arguments.quick else (arguments.slots, arguments.runs)
    report = common.Report("spray", arguments)
    fabric = clos(1, radix)
    run(SpraySettings(clos(1, 4), 2))
    rows = []
    for spray in SPRAYS:
        results = [run(SpraySettings(fabric, slots, spray=spray, seed=seed)) for seed in range(runs)]
        rates = [result.packet_hops / result.seconds for result in results]
        last = results[-1]
        report.results[spray] = {
            "nics": fabric.hosts,
            "packet_hops": last.packet_hops,
            "hops_per_s": common.spread(rates, 0),
            "trimmed_share": sum(last.trimmed.values()) / last.sent,
            "p99_packets": {stage.value: percentile(last.depths[stage], 0.99) for stage in (Stage.UP, Stage.LAST)},
            "budget_met": min(rates) >= BUDGET_HOPS_PER_S,
        }
        rate = common.Spread.of(rates)
        rows.append((spray, f"{rate.median / 1e6:.1f}", f"{rate.low / 1e6:.1f}", f"{last.packet_hops / 1e6:.1f}"))
    common.table([f"{fabric.hosts} NICs", "M hops/s", "least", "M hops a run"], rows)
    report.write()


if __name__ == "__main__":
    main()
