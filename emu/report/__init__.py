"""Reports: what a run was made of and what came of it, as JSON for programs, a page and a table for people.

A report is one JSON object (``SCHEMA``); later versions add keys and raise the number when one changes meaning.

- ``schema``: the number of this layout
- ``name``: of the scenario
- ``started``: ISO 8601, UTC
- ``start_seconds``: until every VM had its controllers
- ``seconds``: from the first step to the last
- ``ok``: every workload passed
- ``error``: why the lab did not come up or the run did not come to its end; "" otherwise
- ``host``: :class:`emu.hostinfo.HostInfo`: CPU, kernel, load before and after, accelerator, QEMU, image
- ``scenario``: as checked, with every default filled in; sizes in bytes, durations in seconds
- ``vms``: by name: ``restored`` from a template snapshot or booted
- ``dpus``: by name: ``worker_restarts`` and ``stats``, null where the daemon does not tell, ``error``
- ``fabric``: where the scenario has one, every link as `emu fabric show --json` has it, use over the whole run
- ``workloads``: in order: type, name, vm, device, ok, error, seconds, samples {metric, value, unit, op},
  histograms {metric, unit, op, bins [[value, count], ...]}, series {metric, unit, op, points [[second, value], ...]},
  card (:mod:`emu.report.card`), detail, files (names below ``workloads/NN-NAME/`` beside the report)
- ``merged``: of workloads of one name on several devices: name, on, samples and histograms of all together
- ``notes``: what was said once on the way (accelerator taken, packages that are not the pinned ones)
"""

from __future__ import annotations

from emu.report.document import SCHEMA, DpuReport, Report, VmReport
from emu.report.terminal import print_report

__all__ = ["SCHEMA", "DpuReport", "Report", "VmReport", "print_report"]
