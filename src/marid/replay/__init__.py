"""``marid.compile``: functions recorded once, then run again without their Python."""
