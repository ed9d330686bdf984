"""Programs that run on a worker across the network: ``docs/remote.md``."""
