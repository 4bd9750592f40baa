"""The corruption olympics: the same accidents for VUA and for other stores of KV caches."""
