"""Values of a request's own that change what its engine's plan says, and where they can be had."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plugins.cache.overrides import Own, least_budget
from trtkv.errors import RequestError

if TYPE_CHECKING:
    from plugins.cache.session import Session
    from trtkv.runtime.sampler import SamplingParams

WITHOUT = "Leave it out, or build an engine with it."


def own_values(params: SamplingParams) -> Own | None:
    """Return what a request asks of selection, None where it leaves everything to the plan."""
    return None if params.budget is None and params.tau is None else Own(params.budget, params.tau)


def check_own(session: Session, params: SamplingParams) -> None:
    """Raise RequestError where an engine cannot give a request its budget or tau."""
    if params.budget is not None:
        _check_budget(session, params.budget)
    if params.tau is not None and not any(one is not None and one.tau is not None for one in session.plan.select):
        raise RequestError(f"policy '{session.plan.policy}' has no tau, and the request asks for {params.tau}", WITHOUT)


def _check_budget(session: Session, budget: int) -> None:
    plans = [one for one in session.plan.select if one is not None]
    why = None
    if not plans or session.held is not None:
        why = f"policy '{session.plan.policy}' has no budget that a request could lower"
    elif session.offload is not None:
        why = "this engine keeps pages on the host and recalls as many for all"
    if why:
        raise RequestError(f"{why}, and the request asks for {budget} tokens", WITHOUT)
    least, most = max(map(least_budget, plans)), min(one.budget for one in plans)
    if not least <= budget <= most:
        raise RequestError(f"a budget of {budget} tokens is outside {least} to {most}, what this engine takes", "Give one in between.")
