"""The worker's side: sessions, what requests do, and the executor that runs programs."""
