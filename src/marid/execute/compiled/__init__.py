"""The compiled tier: parts of programs that repeat, compiled by AOTInductor in a worker process."""
