"""What does harm to a cache directory, for tests that bring it over VUA.

`tests/situations.py` is the table of harm to storages and files by each way to use VUA.
"""
