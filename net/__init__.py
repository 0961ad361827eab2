"""The fabric. Empty until the SRv6 fabric lands; imports neither ``emu`` nor ``dpu``."""
