"""Properties are searched without a clock: how long an example takes says nothing of it."""

from hypothesis import settings

settings.register_profile("no clock", deadline=None)
settings.load_profile("no clock")
