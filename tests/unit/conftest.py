"""Hypothesis: the same examples every time, unless SCOPE_EXPLORE asks for many new ones."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

_ALWAYS = {"deadline": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile("unit", max_examples=60, derandomize=True, **_ALWAYS)
settings.register_profile("explore", max_examples=2000, print_blob=True, **_ALWAYS)
settings.load_profile("explore" if os.environ.get("SCOPE_EXPLORE") else "unit")
