"""Making programs better before they run: where their results lie in memory."""
