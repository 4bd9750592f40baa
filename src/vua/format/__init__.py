"""What the bytes mean: keys, identities, layouts and entries. Pure: no I/O, no threads."""
