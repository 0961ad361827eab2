"""Let atheris look for bytes that a target does not stand.

    NUMBA_DISABLE_JIT=1 python -m tests.fuzz.run TARGET [libFuzzer's options] CORPUS...

It ends with a trace, and a file of the bytes, when an assertion or an exception comes out of the target.
"""

from __future__ import annotations

import logging
import os
import sys

import atheris

assert os.environ.get("NUMBA_DISABLE_JIT") == "1", "compiled code is not seen by the fuzzer"

with atheris.instrument_imports(include=["dpu"]):
    from tests.fuzz.targets import TARGETS


def main() -> None:
    logging.disable(logging.CRITICAL)
    atheris.Setup([sys.argv[0], *sys.argv[2:]], TARGETS[sys.argv[1]])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
