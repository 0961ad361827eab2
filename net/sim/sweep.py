"""Independent jobs, one after the other or in a pool of processes, with progress; results in the jobs' order.

Use: ``results = sweep(function, jobs, workers=2, progress=lambda done, total: ...)``. ``function`` must be importable
by name and each job picklable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import TypeVar

J = TypeVar("J")
R = TypeVar("R")


def sweep(
    function: Callable[[J], R],
    jobs: Sequence[J],
    workers: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[R]:
    """``function`` of each job. The first exception ends the sweep and is raised."""
    if workers <= 1 or len(jobs) <= 1:
        results = []
        for number, job in enumerate(jobs):
            results.append(function(job))
            progress(number + 1, len(jobs))
        return results
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(function, job) for job in jobs]
        try:
            for done, future in enumerate(as_completed(futures)):
                future.result()
                progress(done + 1, len(jobs))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        return [future.result() for future in futures]
