"""Chunks of one namespace: found, read and verified, written, kept apart when damaged."""
