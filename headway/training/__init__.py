"""How training attempts are started, watched and ended. What runs inside the workers is `trainer/`."""
