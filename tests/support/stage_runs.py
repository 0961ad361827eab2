"""Runs of the compiled stage, each in a process of its own that has loaded the code anew.

    python -P -m tests.support.stage_runs LIBRARY COMMANDS

For each line ``FOLDER CACHE`` on standard input: fork, take the package `dpu` of FOLDER and its compiled code from
CACHE, time a new controller's passes (scripts/bench/fastpath.py; LIBRARY is its C side), and print the median pass of
the fastest round in nanoseconds per command. The processes come from one that has imported numba and nothing of
`dpu`, so that they differ only in what they load and in where it comes to lie: each begins with a mapping of random
size.
"""

from __future__ import annotations

import mmap
import os
import random
import sys

import numba  # takes long: once for all

ROUNDS = 12  # of a run; the fastest counts, which other programs disturbed least


def run(folder: str, cache: str, library: str, commands: int) -> float:
    """One run, in this process."""
    shift = mmap.mmap(-1, mmap.PAGESIZE * random.SystemRandom().randrange(1, 4096))
    sys.path.insert(0, folder)
    numba.config.CACHE_DIR = cache  # the variable was read when numba was imported
    import ctypes
    import uuid

    from dpu.backends import MemoryBackend
    from dpu.guestmap import Mapping
    from scripts.bench import fastpath

    case = fastpath.Case("1x32 read 4k", 1, 32, fastpath.READ, 4096, fastpath.HOT)
    memory = MemoryBackend.create("m", fastpath.BLOCK, case.footprint // fastpath.BLOCK, uuid.uuid4())
    mapping = Mapping(memory.fd, case.footprint)
    ctypes.memset(mapping.host, 0x5A, case.footprint)
    rig = fastpath.Rig(case, fastpath.load(library), {False: memory}, mapping)
    product = fastpath.product_pass(cache=True)
    ticks = min(rig.round(product.address, commands)[0] for _ in range(ROUNDS))
    del shift
    return rig.poller.to_ns(round(ticks * 1000)) / 1000 / rig.per_pass


def main() -> None:
    library, commands = sys.argv[1], int(sys.argv[2])
    for line in sys.stdin:
        folder, cache = line.split()
        pid = os.fork()
        if pid == 0:
            print(run(folder, cache, library, commands), flush=True)
            os._exit(0)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
