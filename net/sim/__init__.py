"""Simulation of a fabric under a virtual clock: deterministic by seed."""
