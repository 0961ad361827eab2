"""Independent jobs, one after the other, in a pool of processes or on a Dask cluster; results in the jobs' order.

Use: ``results = sweep(function, jobs, workers=2, progress=lambda done, total: ...)``; on a cluster that is there
(``dask scheduler``, and ``dask worker ADDRESS`` on each machine): ``sweep(function, jobs, dask="tcp://host:8786")``.
``function`` must be importable by name, also where the workers run, and each job picklable.
Errors: SimError for a cluster that does not answer, or without the package (``pip install 'dpu-emu[dask]'``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import get_context
from typing import TypeVar

from net.errors import SimError

J = TypeVar("J")
R = TypeVar("R")


def sweep(
    function: Callable[[J], R],
    jobs: Sequence[J],
    workers: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    dask: str | None = None,
) -> list[R]:
    """``function`` of each job. The first exception ends the sweep and is raised.

    workers: processes here. dask: address of a scheduler, whose workers run the jobs instead.
    """
    if dask is None and (workers <= 1 or len(jobs) <= 1):
        results = []
        for number, job in enumerate(jobs):
            results.append(function(job))
            progress(number + 1, len(jobs))
        return results
    with _pool(workers) if dask is None else _cluster(dask) as pool:
        futures = [pool.submit(function, job) for job in jobs]
        try:
            for done, future in enumerate(as_completed(futures)):
                future.result()
                progress(done + 1, len(jobs))
        except BaseException:
            for future in futures:
                future.cancel()
            raise
        return [future.result() for future in futures]


def _pool(workers: int) -> Executor:
    return ProcessPoolExecutor(workers, mp_context=get_context("spawn"))


@contextmanager
def _cluster(address: str) -> Iterator[Executor]:
    try:
        from distributed import Client
    except ImportError as error:
        raise SimError("Dask is not installed", "pip install 'dpu-emu[dask]'") from error
    try:
        client = Client(address)
    except (OSError, ValueError) as error:
        raise SimError(f"no Dask scheduler at {address}", "start one: dask scheduler") from error
    with client:
        yield client.get_executor()
