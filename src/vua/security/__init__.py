"""Whose files are believed, and keys that keep what is stored secret."""
