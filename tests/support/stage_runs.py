"""Runs of the compiled stage, each in a process of its own that has loaded the code anew.

    python -P -m tests.support.stage_runs LIBRARY COMMANDS

For each line ``FOLDER CACHE ...`` on standard input, any number of such pairs: for each pair fork, take the package
`dpu` of FOLDER and its compiled code from CACHE. When all of them have loaded, which takes ten times as long as what
is measured and may keep every core busy, they time a new controller's passes (scripts/bench/fastpath.py; LIBRARY is
its C side) one after the other, in the line's order. Printed are, on one line, the median passes of their fastest
rounds in nanoseconds per command. The processes come from one that has imported numba and nothing of `dpu`, so that
they differ only in what they load and in where it comes to lie: each begins with a mapping of random size.
"""

from __future__ import annotations

import mmap
import os
import random
import socket
import sys
from collections.abc import Iterator
from typing import Any

import numba  # takes long: once for all

ROUNDS = 12  # of a run; the fastest counts, which other programs disturbed least


def run(folder: str, cache: str, library: str, commands: int) -> Iterator[float]:
    """One run, in this process: yields 0 when it has loaded; is asked for the next one, and measures that."""
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
    yield 0
    ticks = min(rig.round(product.address, commands)[0] for _ in range(ROUNDS))
    del shift
    yield rig.poller.to_ns(round(ticks * 1000)) / 1000 / rig.per_pass


def start(*arguments: Any) -> socket.socket:
    """A run in a child, which tells by a line that it has loaded, measures after a byte, and tells by a line what."""
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        steps = run(*arguments)
        theirs.sendall(f"{next(steps)}\n".encode())
        theirs.recv(1)
        theirs.sendall(f"{next(steps)}\n".encode())
        os._exit(0)
    theirs.close()
    return ours


def main() -> None:
    library, commands = sys.argv[1], int(sys.argv[2])
    for line in sys.stdin:
        words = line.split()
        runs = [start(folder, cache, library, commands) for folder, cache in zip(words[::2], words[1::2])]
        answers = [one.makefile() for one in runs]
        loaded = [one.readline() for one in answers]
        found = []
        for one, answer in zip(runs, answers):
            one.sendall(b"g")
            found.append(answer.readline().strip())
        for one in (*answers, *runs):
            one.close()
        for _ in runs:
            os.wait()
        assert all(loaded) and all(found), "a run failed; its words are above"
        print(*found, flush=True)


if __name__ == "__main__":
    main()
