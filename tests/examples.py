"""How many examples a property test draws: few in `make test`, always the same; many and random ones in `make explore`."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

USUAL = 25
MANY = 20 * USUAL


def register() -> None:
    """Register the profiles `ci`, which is loaded, and `explore`, which `--hypothesis-profile` loads in its stead."""
    shared = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}
    settings.register_profile("ci", **shared, max_examples=USUAL, derandomize=True, database=None)
    settings.register_profile("explore", **shared, max_examples=MANY, derandomize=False, print_blob=True)
    settings.load_profile("ci")
    # Hypothesis also draws numbers that stand in the sources imported so far, and those depend on which tests a worker has run.
    providers._get_local_constants = lambda: providers._local_constants


def examples(usual: int) -> settings:
    """Draw so many examples, and as many times more as the loaded profile does."""
    return settings(max_examples=usual * settings().max_examples // USUAL)
