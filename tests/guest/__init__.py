"""What people do with PyTorch, none of it with Marid: ``python -m tests.guest`` prints what each of these gives."""
