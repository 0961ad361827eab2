"""Scenario files: what is accepted, and what is said about what is not."""

from __future__ import annotations

import os
from dataclasses import fields
from importlib import resources
from pathlib import Path

import pytest

import emu.scenario
from dpu import layout
from dpu.target import Listener, Transport
from emu.daemon import LISTENER_OPTIONS, TRANSPORT_OPTIONS, rpc_calls
from emu.lab import (
    ControllerConfig,
    DiskConfig,
    DpuConfig,
    GroupConfig,
    LabConfig,
    NamespaceConfig,
    VmConfig,
)
from emu.scenario import CONTROLLERS_MAX, ScenarioError, load, parse
from emu.units import format_duration, format_size, parse_duration, parse_size
from emu.workloads.fio import FioParams

GOOD = """
[vm.web]
vcpus = 2
memory = "1G"
kernel = "bzImage"
disk = "root.qcow2"
qemu_args = ["-device", "edu"]
nvme = ["card.fast", "card.bulk"]

[vm.idle]

[dpu.card]
cpus = [0, 1]

[dpu.card.nvme.fast]
namespaces = [{ size = "1G", block_size = 4096 }, { backend = "null", size = "2G" }]

[dpu.card.nvme.bulk]
serial = "S1"
[[dpu.card.nvme.bulk.namespaces]]
backend = "file"
size = "64M"
path = "bulk.raw"

[[workload]]
type = "fio"
vm = "web"
device = "card.fast"
nsid = 2
runtime = "1m"
"""


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two CPUs and 8 GiB, whatever this one has."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(emu.scenario, "memory_available_bytes", lambda: 8 << 30)


def problems(text: str, folder: Path = Path()) -> list[str]:
    with pytest.raises(ScenarioError) as caught:
        parse(text, "x.toml", folder)
    assert str(caught.value) == "\n".join(map(str, caught.value.problems))
    return [str(problem) for problem in caught.value.problems]


def test_a_scenario_becomes_the_lab_that_it_describes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    for name in ("bzImage", "root.qcow2"):
        Path("there", name).touch()
    scenario = parse(GOOD, "there/good.toml", Path("there"))
    assert scenario.lab_config(accel="tcg") == LabConfig(
        name="good",
        accel="tcg",
        vms=(
            VmConfig(
                name="web",
                vcpus=2,
                memory_mib=1024,
                dpus=(("card", "fast"), ("card", "bulk")),
                kernel=Path("there/bzImage"),
                disks=(DiskConfig(Path("there/root.qcow2")),),
                qemu_args=("-device", "edu"),
            ),
            VmConfig(name="idle"),
        ),
        dpus=(
            DpuConfig(
                name="card",
                cpus="0,1",
                controllers=(
                    ControllerConfig(
                        "fast",
                        (
                            NamespaceConfig("memory", 1 << 30, 4096),
                            NamespaceConfig("null", 2 << 30, 512),
                        ),
                    ),
                    ControllerConfig(
                        "bulk", (NamespaceConfig("file", 64 << 20, 512, Path("there/bulk.raw")),), serial="S1"
                    ),
                ),
            ),
        ),
    )
    (params,) = scenario.workloads
    assert isinstance(params, FioParams)
    assert (params.name, params.vm, params.device, params.nsid) == ("fio", "web", "card.fast", 2)
    assert (params.rw, params.runtime) == ("randread", 60.0)


def test_the_only_vm_and_the_only_controller_need_no_naming() -> None:
    scenario = parse('[vm.a]\nnvme = ["d.c"]\n[dpu.d.nvme.c]\n[[workload]]\ntype = "verify"\n', "x.toml", Path())
    assert [(params.vm, params.device) for params in scenario.workloads] == [("a", "d.c")]


def test_namespaces_may_be_volumes_of_a_group() -> None:
    text = VOLUME % 'group = "pool", size = "8G", thin = true }, { group = "pool", size = "2G"'
    (dpu,) = parse(text, "x.toml", Path()).lab_config().dpus
    assert dpu.groups == (GroupConfig("pool", "memory", 2 << 30, 512, 1 << 20),)
    thin, thick = dpu.controllers[0].namespaces
    assert (thin.group, thin.size, thin.thin) == ("pool", 8 << 30, True) and (thick.group, thick.thin) == (
        "pool",
        False,
    )
    calls = rpc_calls(dpu, Path("/run"), Path("/files"))
    assert calls[1] == ("bdev_malloc_create", {"name": "pool.base", "num_blocks": 2049 << 11, "block_size": 512})
    group = {"bdev_name": "pool.base", "lvs_name": "pool", "cluster_sz": 1 << 20}
    assert calls[2] == ("bdev_lvol_create_lvstore", group)
    volume = {"lvs_name": "pool", "lvol_name": "c.1", "size_in_mib": 8192, "thin_provision": True}
    assert calls[4] == ("bdev_lvol_create", volume)
    assert calls[5][1]["namespace"] == {"bdev_name": "pool/c.1", "nsid": 1}


def test_packaged_scenarios_are_right() -> None:
    files = [file for file in (resources.files("emu") / "scenarios").iterdir() if file.name.endswith(".toml")]
    assert any(file.name == "demo.toml" for file in files)
    for file in files:
        parse(file.read_text(), file.name, Path())


def test_every_problem_is_reported_at_once_with_its_line_and_the_nearest_name() -> None:
    text = """\
[vm.web]
vcpu = 2
memory = "5X"
nvme = ["card.fst", "card.fast"]
[vm.Db]
nvme = ["card.fast"]
[dpu.card.nvme.fast]
namespaces = [
  { backend = "memry" },
  { sise = "1G" },
]
[[workload]]
type = "fi"
[[workload]]
type = "fio"
vm = "wb"
rw = "randred"
[[workload]]
type = "verify"
vm = "Db"
nsid = 3
[workloads]
"""
    assert problems(text) == [
        'x.toml:2: unknown key "vcpu"; did you mean "vcpus"? (in [vm.web])',
        'x.toml:3: memory: \'5X\' is not a size; write bytes or a text such as "512M" or "1G"',
        'x.toml:4: unknown controller "card.fst"; did you mean "card.fast"?',
        'x.toml:5: "Db" is no name; use 1 to 16 of a-z, 0-9, "-" and "_"',
        'x.toml:6: controller "card.fast" is attached already, to VM "web"; it takes one',
        'x.toml:9: unknown backend "memry"; did you mean "memory"?',
        'x.toml:10: unknown key "sise"; did you mean "size"? (in [dpu.card.nvme.fast.namespaces])',
        'x.toml:13: unknown workload type "fi"; did you mean "fio"?',
        'x.toml:16: unknown VM "wb"; did you mean "web"?',
        'x.toml:17: unknown rw "randred"; did you mean "randread"?',
        'x.toml:21: controller "card.fast" has namespaces 1 to 2',
        'x.toml:22: unknown key "workloads"; did you mean "workload"?',
    ]


@pytest.mark.parametrize(("key", "meant"), [("bsize", "bs"), ("queue_depth", "iodepth"), ("runtme", "runtime")])
def test_what_other_tools_call_a_key_is_understood(key: str, meant: str) -> None:
    [said] = problems(BASE + f'[[workload]]\ntype = "fio"\n{key} = "4k"\n')
    assert f'unknown key "{key}"; did you mean "{meant}"?' in said


BASE = '[vm.a]\nnvme = ["d.c"]\n[dpu.d.nvme.c]\n'
VOLUME = BASE + 'namespaces = [{ %s }]\n[dpu.d.group.pool]\nsize = "2G"\n'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "1: there is no VM; add a table such as [vm.web]"),
        ("a = ", "1: Invalid value"),
        ("\n\n[vm.a]\n[vm.a]\n", "4: Cannot declare ('vm', 'a') twice"),
        ("[vm.a]\nvcpus = 0\n", "2: vcpus: input should be greater than or equal to 1, not 0"),
        ('[vm.a]\nmemory = "1025K"\n', "1: memory is a whole number of MiB"),
        ('[vm.a]\ninitrd = "x"\n', "1: initrd goes with a kernel"),
        ("vm = 1\n", "1: vm is a table of tables: [vm.NAME]"),
        ("[vm]\na = 1\n", "2: [vm.a] is a table"),
        ('[vm.a]\n[[workload]]\ntype = "fs"\n', '2: VM "a" has no controller to work on'),
        ('[vm.a]\n[vm.b]\n[[workload]]\ntype = "fs"\n', "3: vm or device is missing; a VM: a, b"),
        (BASE + "[[workload]]\n", "4: type is missing"),
        (BASE + "workload = 1\n", "4: unknown key"),
        (BASE + '[[workload]]\ntype = "script"\n', "4: path is missing"),
        (BASE + '[[workload]]\ntype = "script"\npath = "no.sh"\n', "6: there is no file no.sh"),
        (BASE + '[[workload]]\ntype = "fio"\nruntime = "20"\n', "6: runtime: '20' is not a duration"),
        (BASE + '[[workload]]\ntype = "fio"\njob = "j"\nbs = "4k"\n', "4: job = 'j' has its own parameters"),
        (BASE + '[dpu.e.nvme.f]\n[[workload]]\ntype = "fs"\ndevice = "e.f"\n', '7: "e.f" is not attached'),
        (BASE + '[vm.b]\n[[workload]]\ntype = "fs"\nvm = "b"\ndevice = "d.c"\n', '7: "d.c" is attached to VM "a"'),
        (BASE + '[[workload]]\ntype = "script"\npath = "x.toml"\ntimeout = 1\nnsid = 2\n', '6: there is no file'),
        ("[vm.a]\n\n[[workloads]]\n", '3: unknown key "workloads"'),
        (VOLUME % 'group = "poll"', '4: unknown group "poll"; did you mean "pool"?'),
        (VOLUME % 'group = "pool", size = "3G"', '4: group "pool" has no room for this; make it larger, or say thin'),
        (VOLUME % 'group = "pool", backend = "file"', "4: backend is that of the group; leave it out"),
        (VOLUME % 'group = "pool", size = 512', "4: the size of a volume is a whole number of MiB"),
        (VOLUME % "thin = true", "4: thin is of a volume; say the group that it is in"),
        (BASE + '[dpu.d.group.pool]\ncluster_size = "3M"', "4: pool: cluster_size is a power of two from 4K to 64M"),
        (BASE + '[dpu.d.group.pool]\nsize = "100K"', "4: pool: size 102400 is not a multiple of cluster_size"),
        ('[vm.card]\n[dpu.card]\n', '1: "card" is the name of a DPU too'),
        ('[vm.a]\n[dpu.card.nvme.rpc]\n', '2: "rpc" is the name of the DPU\'s RPC socket'),
        ("[vm.a]\n[dpu.d]\ncpus = [0, 7]\n", "3: CPU 7 is not available; allowed: 0, 1"),
        ('[vm.a]\nmemory = "99T"\n', "2: 99 TiB are more than this machine has"),
        ('[vm.a]\nkernel = "no"\n', "2: there is no file no"),
        ('[vm.a]\ndisk = "."\n', "2: there is no file ."),
        (BASE + 'namespaces = [{ size = "5G" }, { backend = "null", size = "9G" },\n{ size = "4G" }]\n',
         '5: memory namespaces need 9 GiB up to here, and 8 GiB are available; make them smaller'),
        (BASE + 'namespaces = [{ backend = "file", path = "no/x" }]\n', "4: there is no folder no; make it"),
        (BASE + 'namespaces = [{ backend = "file", path = "/dev/null" }]\n', "4: /dev/null is neither a file"),
        (BASE + 'namespaces = [{ backend = "null", size = "9999999T" }]\n', "4: size 1099"),
        (BASE + 'namespaces = [{ size = "95M" }]\n[[workload]]\ntype = "verify"\n',
         "5: verify needs 96 MiB and namespace 1 of d.c has 95 MiB; make the namespace bigger"),
        (BASE + 'namespaces = [{ size = "128M" }]\n[[workload]]\ntype = "fs"\nfs = "xfs"\n', "5: xfs with 64 MiB"),
        (BASE + 'namespaces = [{ size = "64M" }]\n[[workload]]\ntype = "fs"\n', "5: ext4 with 64 MiB of files"),
        (BASE + 'namespaces = [{ block_size = 4096 }]\n[[workload]]\ntype = "fio"\nbs = "6k"\n', "5: bs 6k is not a"),
        (BASE + 'namespaces = [{ block_size = 4096 }]\n[[workload]]\ntype = "fio"\nbs = "512-8k"\n', "5: bs 512-8k"),
        (BASE + '[[workload]]\ntype = "fio"\nbs = "8k"\nsize = "4k"\n', "4: bs 8k is larger than the region, 4 KiB"),
        (BASE + '[[workload]]\ntype = "fio"\nbs = "0k"\n', "6: bs: string should match pattern"),
        (BASE + "namespaces = []\n", "4: nvme.c.namespaces: tuple should have at least 1 item"),
        (BASE + 'namespaces = [{ path = "x" }]\n', '4: path goes with backend = "file"'),
        (BASE + 'namespaces = [{ size = "1000B" }]\n', "4: size 1000 is not a multiple of block_size 512"),
        (BASE + 'serial = "S"\n[dpu.d.nvme.e]\nserial = "S"\n', '6: serial "S" is used twice'),
        ('[vm.a]\nshared = false\n', '2: unknown key "shared"; did you mean "share_memory"? (in [vm.a])'),
        ("[vm.a]\n[dpu.d]\nmapped = true\n", '3: unknown key "mapped"; did you mean "force_mappable_bar0"?'),
        (BASE + "disable_msi = true\n", '4: unknown key "disable_msi"; did you mean "disable_msix"?'),
        (BASE + "msi_only = true\n", '4: unknown key "msi_only"; did you mean "disable_msix"?'),
        (BASE + 'disable_msix = "maybe"\n', "4: nvme.c.disable_msix: input should be a valid boolean"),
        ("[vm.a]\n[dpu.d]\nforce_mappable_bar0 = true\ndisable_mappable_bar0 = true\n",
         "2: force_mappable_bar0 and disable_mappable_bar0 exclude each other; leave one out"),
        (BASE + 'disable_msix = true\n[dpu.d]\nengine = "spdk"\n',
         '4: disable_msix is of dpud; leave it out, or engine = "spdk"'),
        ('[vm.a]\n[dpu.d]\nengine = "spdk"\nforce_mappable_bar0 = true\n', "4: force_mappable_bar0 is of dpud"),
        ('[vm.a]\nshare_memory = false\nnvme = ["d.c"]\n[dpu.d.nvme.c]\n[dpu.d]\nengine = "spdk"\n',
         "2: SPDK, the engine of d.c, must map the VM's memory; leave share_memory out"),
        (BASE + 'namespaces = [{backend="file",path="f"},\n{backend="file",path="./f"}]\n', "5: file ./f is"),
    ],
)  # fmt: skip
def test_one_problem(text: str, expected: str) -> None:
    said = problems(text)
    assert any(expected in line.removeprefix("x.toml:") for line in said), said
    assert len(said) <= 3


def test_the_device_tells_the_vm_and_a_wrong_vm_hides_nothing() -> None:
    text = (
        '[vm.a]\nnvme = ["d.c"]\n[vm.b]\nnvme = ["d.e"]\n[dpu.d.nvme.c]\n[dpu.d.nvme.e]\n[[workload]]\ntype = "fs"\n'
    )
    (params,) = parse(text + 'device = "d.e"\n', "x.toml", Path()).workloads
    assert (params.vm, params.device) == ("b", "d.e")
    assert problems(text + 'vm = "x"\ndevice = "d.x"\nnsid = 2\nfs = "zfs"\n[[workload]]\ntype = "fs"\n') == [
        'x.toml:9: unknown VM "x"; known: a, b',
        'x.toml:10: unknown controller "d.x"; did you mean "d.e"?',
        'x.toml:12: unknown fs "zfs"; did you mean "xfs"?',
        "x.toml:13: vm or device is missing; a VM: a, b",
    ]


def test_a_file_of_another_size_is_refused_and_one_that_is_busy_elsewhere_not(tmp_path: Path) -> None:
    text = BASE + 'namespaces = [{ backend = "file", size = "1M", path = "f" }]\n'
    parse(text, "x.toml", tmp_path)
    (tmp_path / "f").write_bytes(bytes(512))
    (said,) = problems(text, tmp_path)
    assert (
        said == f"x.toml:4: {tmp_path}/f has 512 bytes, the namespace 1048576; write size = 512, or give another path"
    )
    os.truncate(tmp_path / "f", 1 << 20)
    parse(text, "x.toml", tmp_path)


def test_front_ends_are_the_options_of_transport_and_listener() -> None:
    text = """\
[vm.a]
nvme = ["own.c", "own.e", "theirs.c"]
[vm.b]
share_memory = false
[dpu.own]
force_mappable_bar0 = true
disable_shadow_doorbells = true
[dpu.own.nvme.c]
disable_msix = true
allow_unsealed_memory = true
[dpu.own.nvme.e]
disable_msix = false
[dpu.theirs]
engine = "spdk"
disable_mappable_bar0 = true
[dpu.theirs.nvme.c]
"""
    config = parse(text, "x.toml", Path()).lab_config()
    assert [vm.share_memory for vm in config.vms] == [True, False]
    asked = [
        (method, {name for name, value in parameters.items() if value is True} - {"allow_any_host"})
        for dpu in config.dpus
        for method, parameters in rpc_calls(dpu, Path("/d"), Path("/f"))
        if method in ("nvmf_create_transport", "nvmf_subsystem_add_listener")
    ]
    assert asked == [
        ("nvmf_create_transport", {"force_mappable_bar0", "disable_shadow_doorbells"}),
        ("nvmf_subsystem_add_listener", {"disable_msix", "allow_unsealed_memory"}),
        ("nvmf_subsystem_add_listener", set()),
        ("nvmf_create_transport", {"disable_mappable_bar0"}),
        ("nvmf_subsystem_add_listener", set()),
    ]


def test_options_are_those_that_the_card_has() -> None:
    assert set(TRANSPORT_OPTIONS) == {one.name for one in fields(Transport)} - {"disable_adaptive_irq"}
    assert set(LISTENER_OPTIONS) == set(Listener("nqn", "/d", "0").options)


def test_limits_are_the_card_s() -> None:
    assert CONTROLLERS_MAX == layout.CONTROLLERS
    names = ", ".join(f'"d.c{number}"' for number in range(25))
    text = f"[vm.a]\nnvme = [{names}]\n" + "".join(f"[dpu.d.nvme.c{number}]\n" for number in range(65))
    said = problems(text)
    assert [line.partition(": ")[0] for line in said] == ["x.toml:2", "x.toml:3"]


def test_a_device_must_be_named_where_there_are_two() -> None:
    text = '[vm.a]\nnvme = ["d.c", "d.e"]\n[dpu.d.nvme.c]\n[dpu.d.nvme.e]\n[[workload]]\ntype = "fs"\n'
    assert problems(text) == ["x.toml:5: device is missing; one of: d.c, d.e"]


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "s.sh").write_text("#!/bin/sh\n")
    (tmp_path / "x.toml").write_text(BASE + '[[workload]]\ntype = "script"\npath = "s.sh"\n')
    (params,) = load(tmp_path / "x.toml").workloads
    assert params.model_dump()["path"] == str(tmp_path / "s.sh")


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"nothing\.toml: cannot be read: No such file"):
        load(tmp_path / "nothing.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ScenarioError, match="not UTF-8"):
        load(tmp_path / "binary.toml")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1G", 1 << 30),
        ("512M", 512 << 20),
        ("1.5k", 1536),
        ("4KiB", 4096),
        ("7", 7),
        (9, 9),
        ("2 TB", 2 << 40),
    ],
)
def test_sizes(text: str | int, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "G", "-1", "1X", 0, True, "1.5", "0K", None, 1.5, "1 G G"])
def test_what_is_no_size(text: str | int) -> None:
    with pytest.raises(ValueError):
        parse_size(text)


@pytest.mark.parametrize(("text", "expected"), [("20s", 20.0), ("500ms", 0.5), ("2m", 120.0), ("1.5h", 5400.0)])
def test_durations(text: str, expected: float) -> None:
    assert parse_duration(text) == expected


@pytest.mark.parametrize("text", ["", "20", "s", "-1s", "0s", "1d", 20])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError):
        parse_duration(text)


def test_numbers_for_people() -> None:
    assert [format_size(value) for value in (512, 1536, 1 << 30, 3 << 40)] == [
        "512 B",
        "1.5 KiB",
        "1 GiB",
        "3 TiB",
    ]
    assert [format_duration(value) for value in (9e-7, 15.3e-6, 0.0042, 75.0)] == [
        "900 ns",
        "15.3 us",
        "4.2 ms",
        "75 s",
    ]
