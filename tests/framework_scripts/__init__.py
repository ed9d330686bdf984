"""Training scripts of frameworks, which take the device where they name none; the last argument is its type."""
