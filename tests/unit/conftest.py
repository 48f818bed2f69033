"""What holds for every unit test."""

from hypothesis import settings

# A deadline in milliseconds measures the machine, not the code: runners of tests are busy.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")
