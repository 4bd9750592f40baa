"""Where entries are kept: a few operations, each with its guarantee."""
