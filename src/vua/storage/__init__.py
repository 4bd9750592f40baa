"""Where files are kept: a few verbs, each with its guarantee."""
