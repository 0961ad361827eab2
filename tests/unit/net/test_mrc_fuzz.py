"""A minute of coverage-guided fuzzing of the decoder, from a corpus of whole frames. The ICRC stops most of what is
mutated, so a trimmed frame, whose check is not looked at, is in the corpus, too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from net.mrc.frame import DSCP, Frame, encode_frame, message, trim
from net.mrc.wire import STACKS, Bth, Meth, Tseth

SECONDS = 60


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 120)
def test_the_decoder_under_a_fuzzer(tmp_path: Path) -> None:
    pytest.importorskip("atheris", reason="pip install atheris")
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for opcode, kinds in STACKS.items():
        stack = [kinds[0](), Tseth(), *(kind() for kind in kinds[1:])] if kinds[0] is Meth else [k() for k in kinds]
        content = message(Bth(opcode, dqp=5), *stack, payload=b"12345678" if kinds[0] is Meth else b"")
        whole = encode_frame(Frame(bytes(16), bytes(16), 0x10001, content, outer_dst=bytes(16)))
        (corpus / f"{opcode:x}").write_bytes(whole)
        (corpus / f"{opcode:x}-trimmed").write_bytes(trim(whole + bytes(64), DSCP.trimmed))
    command = [sys.executable, "-m", "tests.unit.net.fuzz_decoder", f"-max_total_time={SECONDS}", str(corpus)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS + 100)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "DONE" in done.stderr or "Done" in done.stderr, done.stderr[-2000:]
