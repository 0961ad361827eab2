"""engine = "spdk": the user's own nvmf_tgt in place of dpud, with the same scenario.

SPDK itself is not needed: its program is played by dpud behind SPDK's command line. With SPDK_DIR set the last test
runs the real one.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dpu.errors import EmuError
from emu import scenario
from emu.daemon import ControllerConfig, Dpu, DpuConfig, DpuError, NamespaceConfig, daemon_command
from tests.support.nvme_driver import GuestRam, Nvme

MIB = 1 << 20
SCENARIO = """
[vm.web]
nvme = ["card.fast"]

[dpu.card]
engine = "spdk"
cpus = [0]

[dpu.card.nvme.fast]
namespaces = [{ size = "64M" }]
"""

# What SPDK's program is given, and dpud has not; getopt of SPDK refuses any other.
PROGRAM = """#!/bin/sh
echo "nvmf_tgt $*"
test "$1" = -r && socket=$2 && shift 2
test "$1" = -m && shift 2
test "$*" = "--no-pci --disable-cpumask-locks" || exit 64
exec {python} -P -m dpu.daemon -r "$socket"
"""


@pytest.fixture
def place() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="dpu-t-"))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def spdk_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "spdk"
    program = folder / "build/bin/nvmf_tgt"
    program.parent.mkdir(parents=True)
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("SPDK_DIR", str(folder))
    return folder


def config_of(text: str) -> DpuConfig:
    (config,) = scenario.parse(text, "x.toml", Path()).lab_config().dpus
    return config


def test_command_line(spdk_dir: Path) -> None:
    config = config_of(SCENARIO)
    assert (config.engine, config.controllers[0].name) == ("spdk", "fast")
    program = str(spdk_dir / "build/bin/nvmf_tgt")
    options = ["--no-pci", "--disable-cpumask-locks"]
    assert daemon_command(config, Path("/run/r")) == [program, "-r", "/run/r", "-m", "[0]", *options]
    assert daemon_command(config_of(SCENARIO.replace("cpus = [0]", "")), Path("/r")) == [
        program,
        "-r",
        "/r",
        *options,
    ]
    assert "dpu.daemon" in daemon_command(config_of(SCENARIO.replace('engine = "spdk"', "")), Path("/r"))


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(scenario.ScenarioError, match=r'x.toml:6: unknown engine "spdx"; did you mean "spdk"\?'):
        config_of(SCENARIO.replace('"spdk"', '"spdx"'))


def test_without_spdk_the_fix_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPDK_DIR", raising=False)
    with pytest.raises(EmuError, match="SPDK_DIR is not set"):
        daemon_command(config_of(SCENARIO), Path("/run/r"))
    monkeypatch.setenv("SPDK_DIR", str(tmp_path))
    with pytest.raises(EmuError, match=f"there is no program {tmp_path}/build/bin/nvmf_tgt") as error:
        daemon_command(config_of(SCENARIO), Path("/run/r"))
    assert "--with-vfio-user" in error.value.hint


async def io_through(place: Path) -> None:
    """Start, configure, write and read by a driver of our own, stop."""
    namespaces = (NamespaceConfig(size=16 * MIB), NamespaceConfig("file", 16 * MIB, 4096))
    config = DpuConfig("card", (ControllerConfig("fast", namespaces),), engine="spdk")
    dpu = Dpu(config, place, place, place)
    await dpu.start()
    try:
        await dpu.configure()
        bdevs = await dpu.rpc("bdev_get_bdevs")
        assert [bdev["num_blocks"] * bdev["block_size"] for bdev in bdevs] == [16 * MIB] * 2
        await asyncio.to_thread(verify, str(dpu.socket("fast")))
    finally:
        await dpu.stop()
    assert dpu.log == place / "nvmf_tgt.log"


def verify(socket: str) -> None:
    nvme = Nvme(socket, GuestRam())
    try:
        nvme.enable()
        queue = nvme.create_queue_pair(1, 32)
        for nsid, block in ((1, 512), (2, 4096)):
            nvme.write(queue, nsid, 3, b"\x5a" * 8192, block=block)
            assert nvme.read(queue, nsid, 3, 8192, block=block) == b"\x5a" * 8192
    finally:
        nvme.close()
        nvme.ram.close()


def test_the_lab_drives_it(place: Path, spdk_dir: Path) -> None:
    asyncio.run(io_through(place))
    assert (place / "nvmf_tgt.log").read_text().startswith(f"nvmf_tgt -r {place}/rpc --no-pci")


def test_one_that_does_not_start_shows_its_log(place: Path, spdk_dir: Path) -> None:
    (spdk_dir / "build/bin/nvmf_tgt").write_text("#!/bin/sh\necho no hugepages\nexit 3\n")

    async def main() -> Any:
        with pytest.raises(DpuError, match="nvmf_tgt ended with 3 before it was ready") as error:
            await Dpu(DpuConfig("card", engine="spdk"), place, place, place).start()
        return error.value.log

    assert asyncio.run(main()) == ["no hugepages"]


def test_the_real_one(place: Path) -> None:
    if not os.environ.get("SPDK_DIR"):
        pytest.skip("SPDK_DIR is not set: no SPDK to run")
    asyncio.run(io_through(place))
