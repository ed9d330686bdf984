"""Programs as files: a recorded function with its state, which runs without the function's Python."""
