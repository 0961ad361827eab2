"""pytest fixtures of the lab."""
