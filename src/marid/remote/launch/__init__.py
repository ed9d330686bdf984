"""Starting workers, connecting to them, and looking at a connection."""
