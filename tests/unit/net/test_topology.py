"""Topology against numbers worked out by hand and against a graph that is searched by brute force."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections import defaultdict, deque
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from net.errors import TopologyError
from net.topology import Node, Path, Tier, Topology, clos, multi_plane, single_plane_three_tier

Graph = dict[str, set[str]]


def graph_of(fabric: Topology) -> Graph:
    graph: Graph = defaultdict(set)
    for link in fabric.links():
        graph[link.lower.node.name].add(link.upper.node.name)
        graph[link.upper.node.name].add(link.lower.node.name)
    return graph


def shortest_paths(graph: Graph, src: str, dst: str) -> list[tuple[str, ...]]:
    """All of them, by breadth-first search over whole paths; never through another host."""
    found: list[tuple[str, ...]] = []
    queue: deque[tuple[str, ...]] = deque([(src,)])
    while queue:
        path = queue.popleft()
        if found and len(path) >= len(found[0]):
            break
        for near in graph[path[-1]]:
            if near == dst:
                found.append((*path, near))
            elif near not in path and not near.startswith("h"):
                queue.append((*path, near))
    return found


def fat_tree(radix: int) -> Graph:
    """Three tiers, wired as the textbook does it; written without a look at the closed form."""
    half = radix // 2
    graph: Graph = defaultdict(set)

    def join(a: str, b: str) -> None:
        graph[a].add(b)
        graph[b].add(a)

    for pod in range(radix):
        for low in range(half):
            for port in range(half):
                join(f"h{pod}.{low}.{port}", f"e{pod}.{low}")
                join(f"e{pod}.{low}", f"a{pod}.{port}")
        for high in range(half):
            for port in range(half):
                join(f"a{pod}.{high}", f"c{high}.{port}")
    return graph


def test_the_papers_fabric() -> None:
    """arXiv 2605.04333 section 2: 8 planes of 512-port switches against 64 x 800G in three tiers."""
    flat = clos(planes=8, radix=512)
    assert (flat.hosts, flat.switches) == (131_072, 6_144)
    assert (flat.planes * flat.t0_per_plane, flat.planes * flat.t1_per_plane) == (4096, 2048)
    new, old = multi_plane(8, 512), single_plane_three_tier(64)
    assert (new.hosts, new.switches, old.hosts, old.switches) == (131_072, 6_144, 65_536, 5_120)
    assert new.switches_per_host / old.switches_per_host == Fraction(3, 5)
    assert Fraction(new.links_per_host, old.links_per_host) == Fraction(2, 3)
    assert (new.path_switches_max, old.path_switches_max) == (3, 5)
    assert (new.uplink_share, old.uplink_share, new.port_share) == (Fraction(1, 256), Fraction(1, 32), Fraction(1, 8))
    assert (new.one_switch_hosts, old.one_switch_hosts, new.paths) == (256, 32, 2048)


@pytest.mark.parametrize(
    ("planes", "radix", "hosts", "t0", "t1"), [(2, 4, 8, 8, 4), (4, 8, 32, 32, 16), (8, 4, 8, 32, 16)]
)
def test_emulator_sizes(planes: int, radix: int, hosts: int, t0: int, t1: int) -> None:
    fabric = clos(planes, radix)
    tiers = [node.tier for node in fabric.nodes()]
    assert [tiers.count(tier) for tier in Tier] == [hosts, t0, t1]


@pytest.mark.parametrize(("planes", "radix"), [(1, 2), (2, 4), (3, 6), (8, 4)])
def test_closed_forms_against_a_searched_graph(planes: int, radix: int) -> None:
    fabric, closed = clos(planes, radix), multi_plane(planes, radix)
    graph = graph_of(fabric)
    hosts = sorted(name for name in graph if name.startswith("h"))
    assert (len(hosts), len(graph) - len(hosts)) == (closed.hosts, closed.switches) == (fabric.hosts, fabric.switches)
    assert all(len(graph[name]) == (planes if name in hosts else radix) for name in graph)
    assert sum(map(len, graph.values())) == 2 * fabric.link_count == 2 * closed.links_per_host * planes * closed.hosts
    from_first = {dst: shortest_paths(graph, hosts[0], dst) for dst in hosts[1:]}
    longest = max(from_first.values(), key=lambda paths: len(paths[0]))
    assert (len(longest[0]) - 2, len(longest)) == (closed.path_switches_max, closed.paths)
    near = 1 + sum(len(paths[0]) == 3 for paths in from_first.values())
    assert near == closed.one_switch_hosts


@pytest.mark.parametrize("radix", [2, 4, 6])
def test_three_tier_closed_form_against_a_searched_graph(radix: int) -> None:
    closed, graph = single_plane_three_tier(radix), fat_tree(radix)
    hosts = sorted(name for name in graph if name.startswith("h"))
    assert (len(hosts), len(graph) - len(hosts)) == (closed.hosts, closed.switches)
    assert sum(map(len, graph.values())) == 2 * closed.links_per_host * closed.hosts
    far = shortest_paths(graph, hosts[0], hosts[-1])
    assert (len(far[0]) - 2, len(far)) == (closed.path_switches_max, closed.paths)


FABRICS = st.builds(
    Topology, st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)
)  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(FABRICS, st.data())
def test_entropy_values_and_paths_are_inverse(fabric: Topology, data: st.DataObject) -> None:
    src, dst = data.draw(st.integers(0, fabric.hosts - 1)), data.draw(st.integers(0, fabric.hosts - 1))
    evs = fabric.evs(src, dst)
    paths = [fabric.path(src, dst, ev) for ev in evs]
    assert [fabric.ev(path) for path in paths] == evs
    if src != dst:
        named = sorted(tuple(node.name for node in fabric.path_nodes(path)) for path in paths)
        everything = shortest_paths(graph_of(fabric), f"h{src}", f"h{dst}")
        assert named == sorted(everything)


@settings(deadline=None, max_examples=60)
@given(FABRICS, st.data())
def test_ports_of_a_path_are_the_ends_of_its_links(fabric: Topology, data: st.DataObject) -> None:
    src, dst = data.draw(st.integers(0, fabric.hosts - 1)), data.draw(st.integers(0, fabric.hosts - 1))
    path = fabric.path(src, dst, data.draw(st.sampled_from(fabric.evs(src, dst))))
    peer = {link.lower: link.upper for link in fabric.links()} | {link.upper: link.lower for link in fabric.links()}
    nodes = fabric.path_nodes(path)
    assert [(port.node, peer[port].node) for port in fabric.path_ports(path)] == list(itertools.pairwise(nodes))


def test_names_are_unique_and_short() -> None:
    fabric = clos(8, 4)
    names = [node.name for node in fabric.nodes()] + [link.name for link in fabric.links()]
    assert len(set(names)) == len(names) == fabric.hosts + fabric.switches + fabric.link_count
    assert Node(Tier.T1, 7, 2047).name == "p7-t1-2047" and Node(Tier.HOST, 0, 5).name == "h5"
    assert fabric.uplink(1, 3, 0).name == "p1-t0-3:p1-t1-0" and fabric.host_link(1, 3).name == "h3:p1-t0-1"


def test_mistakes_name_the_fix() -> None:
    fabric = Topology(2, 2, 3, 2)
    with pytest.raises(TopologyError, match="give 1 to 8"):
        Topology(9, 1, 1, 1)
    with pytest.raises(TopologyError, match="host_rate_bps is 0"):
        Topology(1, 1, 1, 1, host_rate_bps=0)
    with pytest.raises(TopologyError, match="even number"):
        clos(1, 3)
    with pytest.raises(TopologyError, match="hosts are 0 to 3"):
        fabric.place(4)
    for ev in (2 << 16, 3, -1):
        with pytest.raises(TopologyError, match="2 planes with 3 uplinks"):
            fabric.path(0, 3, ev)
    with pytest.raises(TopologyError, match="no path here"):
        fabric.ev(Path(0, 1, 0, 2))  # both below one T0: there is no T1 on the way


def test_net_stands_alone() -> None:
    """Importing every module of ``net`` brings in neither of the others."""
    program = (
        "import pkgutil, sys, net, importlib\n"
        "for module in pkgutil.walk_packages(net.__path__, 'net.'): importlib.import_module(module.name)\n"
        "assert 'net.topology' in sys.modules\n"
        "print([name for name in sys.modules if name.partition('.')[0] in ('emu', 'dpu')])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
