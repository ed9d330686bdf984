"""Whole models, as plain PyTorch modules that use Marid's operators and nothing else of it."""
