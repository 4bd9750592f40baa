"""Chunks of one namespace: found, read and verified, written, quarantined when damaged."""
