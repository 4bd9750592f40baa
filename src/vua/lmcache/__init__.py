"""For LMCache: an L2 adapter, and GPU connectors, which also work without LMCache."""
