"""Coverage-guided fuzzing of what strangers can send us. See targets.py."""
