"""The laboratory of eviction policies: traces replayed and simulated, and plots."""
