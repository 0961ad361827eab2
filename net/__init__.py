"""The fabric: topology, SRv6 addressing, switches, MRC transport, simulation; imports neither ``emu`` nor ``dpu``."""
