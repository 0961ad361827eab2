"""Switches: the queue behind each port, as a model and (later) as programs."""
