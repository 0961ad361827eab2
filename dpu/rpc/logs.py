"""Log levels and flags under SPDK's names.

A message of the daemon's worker is written when its level reaches both the log level and the print level (SPDK has a
second output, the system's log; here there is one). A flag lets the debugging messages of one part through as soon
as the print level is DEBUG. What is set holds for the workers to come; the keeper always logs at INFO.

Use: ``Logs().apply()`` after a change. Source: SPDK's JSON-RPC documentation, log_*.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LEVELS = {
    "ERROR": logging.ERROR,
    "WARNING": logging.WARNING,
    "NOTICE": 25,
    "INFO": logging.INFO,
    "DEBUG": logging.DEBUG,
}
logging.addLevelName(LEVELS["NOTICE"], "NOTICE")

FLAGS = {"rpc": "dpu.rpc"}
"""Parts with debugging messages, and their loggers."""


@dataclass
class Logs:
    level: str = "INFO"
    print_level: str = "INFO"
    flags: frozenset[str] = frozenset()

    def apply(self) -> None:
        """Make the loggers follow."""
        logging.getLogger("dpu").setLevel(max(LEVELS[self.level], LEVELS[self.print_level]))
        for flag, name in FLAGS.items():
            on = flag in self.flags and self.print_level == "DEBUG"
            logging.getLogger(name).setLevel(logging.DEBUG if on else logging.NOTSET)

    def to_config(self) -> dict[str, Any]:
        return {"level": self.level, "print_level": self.print_level, "flags": sorted(self.flags)}

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> Logs:
        return Logs(config["level"], config["print_level"], frozenset(config["flags"]))
