"""Recorded events played back through the real serving path, on a clock that the replay moves."""
