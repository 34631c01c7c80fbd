"""Sizing study of one site for one or several request rates: prefill and decode pools, or aggregated workers."""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.core.errors import ConfigurationError
from tandem.planning.aggregated import size_aggregated
from tandem.planning.pool_sizing import size_pools
from tandem.planning.roofline import HandOffEstimate, Roofline
from tandem.planning.sizing import DeploymentSite, Sizing
from tandem.planning.worker_facts import WorkerFacts, worker_facts


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedDeployment:
    """Pools for one rate. `apart`: prefill and decode pools; `together`: aggregated workers of the cheaper kind."""

    apart: Sizing
    together: Sizing
    together_roofline: Roofline


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """Results for one site. `choices`: by rate, in order. `hand_off`: of a prompt at the objective's percentile."""

    site: DeploymentSite
    prefill: WorkerFacts
    decode: WorkerFacts
    hand_off: HandOffEstimate
    choices: Sequence[SizedDeployment]

    @property
    def peak(self) -> SizedDeployment:
        """The choice for the highest rate."""
        return max(self.choices, key=lambda choice: choice.apart.rate_per_s)

    @property
    def fits(self) -> bool:
        """Whether both kinds of workers hold the model and its longest request; if not, the sizes are meaningless."""
        longest = self.site.profile.longest
        return all(
            roofline.kv_memory_bytes >= roofline.held_bytes(longest)
            for roofline in (self.site.prefill, self.site.decode)
        )


def study(site: DeploymentSite, rates_per_s: Sequence[float]) -> Study:
    """Sizes the site for each of the rates, in requests per second.

    Raises:
        ConfigurationError: no rate is given, or one is not above zero.
    """
    if not rates_per_s or not all(0 < rate < 1e6 for rate in rates_per_s):
        raise ConfigurationError(f"rates {list(rates_per_s)}: give one or more, each above zero requests a second")
    return Study(
        site=site,
        prefill=worker_facts(site.prefill, site.profile, site.goals),
        decode=worker_facts(site.decode, site.profile, site.goals),
        hand_off=site.hand_off(site.profile.prompt_at(site.goals.share)),
        choices=[_choose(site, rate) for rate in rates_per_s],
    )


def _choose(site: DeploymentSite, rate_per_s: float) -> SizedDeployment:
    kinds = [site.prefill] if site.decode == site.prefill else [site.prefill, site.decode]
    together = [(size_aggregated(kind, site.profile, site.goals, rate_per_s), kind) for kind in kinds]
    sizing, kind = min(together, key=lambda pair: (len(pair[0].problems), pair[0].usd_per_hour))
    return SizedDeployment(apart=size_pools(site, rate_per_s), together=sizing, together_roofline=kind)
