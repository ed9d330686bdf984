"""Small scripts of the kinds that people write for GPUs, without data sets: what they print is compared with what the
CPU prints."""
