"""For LMCache: an L2 adapter, and what it calls GPU connectors; the latter work without it."""
