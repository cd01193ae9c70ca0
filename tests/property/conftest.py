"""The same random cases in every run: a failure is never a matter of luck."""

from hypothesis import settings

settings.register_profile("forestream", deadline=None, max_examples=100, derandomize=True, database=None)
settings.load_profile("forestream")
