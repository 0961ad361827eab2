"""The experiments of the MRC paper, small and in virtual time: see ``python -m net.experiments --help``."""
