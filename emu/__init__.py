"""The lab: virtual machines, scenarios, workloads and reports around the card in ``dpu``."""
