"""What VUA tests itself with, shipped so that a storage or an adapter of your own can use it too.

Nothing here is imported by the library proper; each module says what it needs to be installed.
"""
