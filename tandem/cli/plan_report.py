"""Prints a study, the result of `tandem plan`: tables, rooflines drawn with characters, and the verdict."""

import math
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from tandem.cli.plan_picture import PlotPoint, draw_roofline
from tandem.planning.roofline import Roofline
from tandem.planning.sizing import SizedPool, Sizing
from tandem.planning.study import SizedDeployment, Study
from tandem.planning.worker_facts import WorkerFacts, decode_point, prefill_point

WIDTH = 120


def print_study(console: Console, study: Study) -> None:
    """Print the whole study."""
    console.print(_headline(study), markup=False, soft_wrap=True)
    tables = [_worker_table(study)]
    if study.fits:
        tables += [_pool_table(study), _user_table(study)]
        tables += [_rate_table(study)] if len(study.choices) > 1 else []
    for table in tables:
        console.print(table)
        console.print()
    if study.fits:
        console.print("\n".join(draw_roofline(roofs(study), marks(study))), markup=False, soft_wrap=True)
        console.print()
    for line in verdict(study):
        console.print(line, markup=False, soft_wrap=True)


def roofs(study: Study) -> Sequence[tuple[str, Roofline]]:
    """Returns the rooflines to draw: one, or two if decode workers are of another kind."""
    prefill, decode = study.site.prefill, study.site.decode
    named = [(_hardware(prefill), prefill)]
    return named if _is_same(prefill, decode) else [*named, (_hardware(decode), decode)]


def marks(study: Study) -> Sequence[PlotPoint]:
    """Returns the points to draw: the mean prompt, one decoding request, and the expected batch."""
    site, running = study.site, max(1.0, study.peak.apart.num_running)
    prompt, context = site.profile.mean_prompt, site.profile.mean_context
    found = [
        PlotPoint(
            prefill_point(site.prefill, prompt, site.profile.cached(prompt)),
            "P",
            f"prefill of the mean prompt, {prompt:,.0f} tokens",
        ),
        PlotPoint(decode_point(site.decode, 1, context), "d", f"decode of one request, context of {context:,.0f}"),
    ]
    if math.isfinite(running) and running >= 1.5:
        found.append(
            PlotPoint(decode_point(site.decode, running, context), "D", f"decode of {running:,.0f} requests at once")
        )
    return found


def verdict(study: Study) -> list[str]:
    """Returns sentences: unmet objectives and why, or the recommended pools and the cost of the alternative."""
    peak = study.peak
    problems = list(dict.fromkeys(problem for choice in study.choices for problem in choice.apart.problems))
    if problems:
        lines = [f"cannot be met: {problem}" for problem in problems]
        return lines if peak.together.problems else [*lines, _together_words(peak)]
    lines = [f"plan for {peak.apart.rate_per_s:g} requests/s: {_apart_words(peak.apart)}; {_together_words(peak)}"]
    model = study.site.prefill.model
    if study.site.profile.longest > model.max_tokens:
        lines.append(
            f"note: the longest request has {study.site.profile.longest:,} tokens, {model.name} is made for "
            f"{model.max_tokens:,}"
        )
    return lines


def _apart_words(sizing: Sizing) -> str:
    decode = sizing.decode.num_workers if sizing.decode else 0
    return (
        f"{sizing.prefill.num_workers} prefill and {decode} decode workers, {_count(sizing.num_accelerators)}, "
        f"${sizing.usd_per_hour:,.2f} an hour"
    )


def _together_words(choice: SizedDeployment) -> str:
    apart, together = choice.apart, choice.together
    if together.problems:
        return f"workers that do both cannot meet it: {together.problems[0]}"
    return (
        f"workers that do both can meet it: {together.prefill.num_workers} of {_hardware(choice.together_roofline)}, "
        f"${together.usd_per_hour:,.2f} an hour, a token then waiting up to {_ms(together.longest_gap_ms)} for a "
        f"prompt's chunk (apart: {_ms(apart.longest_gap_ms)})"
    )


def _headline(study: Study) -> str:
    model, profile, goals = study.site.prefill.model, study.site.profile, study.site.goals
    active = model.num_active_parameters + (0 if model.tied else model.num_table_parameters)
    parameters = f"{_parameters(model.num_parameters)} parameters"
    if model.num_expert_parameters:
        parameters += f" ({_parameters(active)} for a token, {_gb(model.expert_bytes)} of experts)"
    constant = model.kv_bytes_per_request
    state = f" and {constant / 1e6:.3g} MB of state per request" if constant else ""
    return (
        f"{model.name}: {parameters}, {_gb(model.weight_bytes)} at {model.weight_bits:.3g} bits, "
        f"{model.kv_bytes_per_token / 1e3:.0f} KB of KV per token{state}\n"
        f"asked: prompts of {profile.mean_prompt:,.0f} tokens in the mean, {profile.prefix_hit:.0%} of them cached, "
        f"answers of {profile.mean_output:,.0f}; for {100 * goals.share:g}% of requests TTFT {_ms(goals.ttft_ms)} and "
        f"TPOT {_ms(goals.tpot_ms)}\n{_products(study)}{_drafts(study)}"
    )


def _products(study: Study) -> str:
    """A line on how the weights of a quantised checkpoint are multiplied; empty = it is not known."""
    shares = study.site.prefill.model.shares
    if not shares:
        return ""
    kinds = ", ".join(f"{each.share:.1%} {each.products}" for each in shares)
    bits = 8 if study.site.prefill.assumptions.products_8bit else 16
    return f"products, by share of the weights: {kinds}; planned at the {bits}-bit rate\n"


def _drafts(study: Study) -> str:
    """A line on how decode workers draft; empty = they do not."""
    drafts = study.site.decode.drafts
    if drafts is None:
        return ""
    line = f"drafts: {drafts.acceptance:.0%} right, at most {drafts.most} a step"
    if drafts.drafter is None:
        return f"{line}\n"
    per_token = drafts.drafter.network.kv_bytes_per_token
    line += f", by {drafts.drafter.network.name}: {_gb(drafts.weight_bytes)}, {per_token / 1e3:.3g} KB per token"
    return f"{line}\n" if study.site.prefill.drafts is None else f"{line}, on prefill workers too\n"


def _worker_table(study: Study) -> Table:
    prefill, decode, goals = study.prefill, study.decode, study.site.goals
    prompt = f"{prefill.prompt_tokens:,}"
    table = _table("one worker", "prefill", "decode")

    def row(name: str, *cells: str) -> None:
        table.add_row(name, *cells)

    row("accelerators", _hardware(study.site.prefill), _hardware(study.site.decode))
    row("ridge, FLOP per byte", f"{prefill.ridge:.0f}", f"{decode.ridge:.0f}")
    row("memory for KV", _room(prefill), _room(decode))
    row(f"KV of a prompt of {prompt} tokens", _gb(prefill.prompt_kv_bytes), _gb(decode.prompt_kv_bytes))
    row("its prefill: at best, likely", f"{_ms(prefill.prefill_floor_ms)}, {_ms(prefill.prefill_ms)}", "")
    row("KV that it makes, a link to keep up", f"{prefill.kv_bytes_per_s / 1e9:.2f} GB/s", "")
    row("its hand-off: whole, exposed", f"{_ms(study.hand_off.ms)}, {_ms(study.hand_off.exposed_ms)}", "")
    row("swept by a step after it", "", _gb(decode.step_bytes))
    name = "that step: at best, likely" if study.site.decode.drafts is None else "a token with drafts: at best, likely"
    row(name, "", f"{_ms(decode.step_floor_ms)}, {_ms(decode.step_ms)}")
    row("tokens/s of one request at best", "", f"{decode.tokens_per_s:.0f}")
    row(f"requests of {decode.mean_context:,.0f} tokens that fit", "", f"{decode.num_fitting:,}")
    row(f"requests within {_ms(goals.tpot_ms)} a step", "", f"{decode.num_within_tpot:,}")
    return table


def _room(facts: WorkerFacts) -> str:
    """Memory left for KV, and the number of tokens that fit into it, if a token takes any."""
    if facts.kv_memory_bytes < 0:
        return f"none: {_gb(-facts.kv_memory_bytes)} too few"
    return _gb(facts.kv_memory_bytes) + (f", {facts.kv_tokens:,} tokens" if facts.kv_tokens else "")


def _pool_table(study: Study) -> Table:
    peak = study.peak
    table = _table(f"pools at {peak.apart.rate_per_s:g} requests/s", "prefill", "decode", _together(peak))
    assert peak.apart.decode is not None
    pools = (peak.apart.prefill, peak.apart.decode, peak.together.prefill)
    table.add_row("workers", *(f"{pool.num_workers:,}" for pool in pools))
    table.add_row("accelerators", *(f"{pool.num_accelerators:,}" for pool in pools))
    table.add_row("what asks for so many", *(pool.limit for pool in pools))
    table.add_row("time taken by prompts", *(_share(pool.time_use) for pool in pools))
    table.add_row("KV taken, when many", *(_share(pool.kv_use) for pool in pools))
    table.add_row("link needed of each worker", *(_link(study, pool) for pool in pools))
    table.add_row("cost an hour", *(f"${pool.usd_per_hour:,.2f}" for pool in pools))
    return table


def _user_table(study: Study) -> Table:
    share, profile = f"{100 * study.site.goals.share:g}", study.site.profile
    both = (study.peak.apart, study.peak.together)
    table = _table("what users get", "prefill + decode", _together(study.peak))
    table.add_row("TTFT: mean, p" + share, *(f"{_ms(s.ttft.mean_ms)}, {_ms(s.ttft.high_ms)}" for s in both))
    table.add_row("TPOT: mean, p" + share, *(f"{_ms(s.tpot.mean_ms)}, {_ms(s.tpot.high_ms)}" for s in both))
    table.add_row("longest usual gap between tokens", *(_ms(s.longest_gap_ms) for s in both))
    table.add_row("requests decoding in a worker", *(f"{s.num_running:,.1f}" for s in both))
    table.add_row("accelerators", *(f"{s.num_accelerators:,}" for s in both))
    table.add_row("cost of a million output tokens", *(_usd(s, profile.mean_output) for s in both))
    all_tokens = profile.mean_prompt + profile.mean_output
    table.add_row("cost of a million tokens, in and out", *(_usd(s, all_tokens) for s in both))
    return table


def _rate_table(study: Study) -> Table:
    table = _table("requests/s", "prefill", "decode", "accelerators", "cost an hour", "if both in one")
    for choice in study.choices:
        apart, together = choice.apart, choice.together
        assert apart.decode is not None
        table.add_row(
            f"{apart.rate_per_s:g}",
            f"{apart.prefill.num_workers:,}",
            f"{apart.decode.num_workers:,}",
            f"{apart.num_accelerators:,}",
            f"${apart.usd_per_hour:,.2f}",
            f"{together.num_accelerators:,}",
        )
    total = math.fsum(choice.apart.num_accelerators for choice in study.choices) / len(study.choices)
    table.add_row("mean, if pools follow", "", "", f"{total:.1f}", "", "")
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 3, 0, 0))
    table.add_column(title, no_wrap=True, min_width=36)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _link(study: Study, pool: SizedPool) -> str:
    usable = study.site.link.usable_bytes_per_s
    return f"{pool.link_use * usable / 1e9:.2f} of {usable / 1e9:.1f} GB/s" if pool.link_use else "none"


def _usd(sizing: Sizing, num_tokens: float) -> str:
    return f"${sizing.usd_per_million(num_tokens):,.2f}"


def _together(choice: SizedDeployment) -> str:
    return f"both on {_hardware(choice.together_roofline)}"


def _hardware(roofline: Roofline) -> str:
    stages = "" if roofline.num_stages == 1 else f" in {roofline.num_stages} stages"
    return f"{roofline.num_accelerators} x {roofline.hardware.name}{stages}"


def _is_same(one: Roofline, other: Roofline) -> bool:
    return (one.hardware, one.num_accelerators, one.num_stages) == (
        other.hardware,
        other.num_accelerators,
        other.num_stages,
    )


def _count(num_accelerators: int) -> str:
    return f"{num_accelerators:,} accelerator{'' if num_accelerators == 1 else 's'}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _parameters(num: float) -> str:
    return f"{num / 1e9:.2f} B" if num >= 1e9 else f"{num / 1e6:.1f} M"


def _gb(num_bytes: float) -> str:
    if abs(num_bytes) < 1e8:
        return f"{num_bytes / 1e6:.1f} MB"
    return f"{num_bytes / 1e9:.2f} GB" if abs(num_bytes) < 1e10 else f"{num_bytes / 1e9:.1f} GB"


def _ms(value: float) -> str:
    if math.isinf(value):
        return "endless"
    if value >= 1000:
        return f"{value / 1000:.2f} s"
    return f"{value:.1f} ms" if value < 100 else f"{value:.0f} ms"
