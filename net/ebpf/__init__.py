"""eBPF written in Python: a builder over LLVM's IR (``program``), bpf(2) (``kernel``), the fabric's programs."""
