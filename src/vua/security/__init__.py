"""Whose files are trusted, and the keys that keep stored data secret."""
