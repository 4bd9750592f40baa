"""How tests of properties run: `given` and `settings` come from here, never from hypothesis itself.

An example may take as long as it takes: on a busy machine any of them takes too long now and then.
What hangs ends by the time limit of the whole run.
"""

from hypothesis import HealthCheck, given, seed, settings

__all__ = ["HealthCheck", "given", "seed", "settings"]

settings.register_profile("vua", deadline=None)
settings.load_profile("vua")
