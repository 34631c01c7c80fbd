"""`tandem plan`: computes how many workers a workload needs, the latencies of its users, and the cost.

Owns the flags (each also a TANDEM_PLAN_* variable) and the exit code; `tandem.planning` does the arithmetic. Needs no
network for built-in models, no weights, and torch only for quantised checkpoints.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from pydantic import Field, field_validator
from rich.console import Console

from tandem.architecture.cost import ModelCost
from tandem.architecture.shards import WIDTHS
from tandem.architecture.stages import check_group
from tandem.cli.model_cost import named_model
from tandem.cli.plan_context_memory import context_memory_as_json, print_context_memory
from tandem.cli.plan_drafts import planned_drafts
from tandem.cli.plan_figure import check_figure, save_roofline
from tandem.cli.plan_group_sizes import group_sizes_as_json, print_group_sizes
from tandem.cli.plan_json import study_as_json
from tandem.cli.plan_report import WIDTH, marks, print_study, roofs
from tandem.core.config import MAX_SPECULATIVE_TOKENS
from tandem.core.errors import ConfigurationError
from tandem.core.speculate import serves_prompts
from tandem.loadtest.text_lengths import parse_lengths
from tandem.planning.group_size import GroupSize
from tandem.planning.group_size_search import GroupSizeSearch, group_size_facts, search_group_sizes, sizes_of
from tandem.planning.hardware import find_accelerator, find_link
from tandem.planning.planned_drafts import PlannedDrafts
from tandem.planning.profile import Profile, draw_profile, sample_profile
from tandem.planning.roofline import TYPICAL, Assumptions, Roofline
from tandem.planning.sizing import DeploymentSite, Goals
from tandem.planning.study import Study, study
from tandem.process.settings import Settings
from tandem.workload.trace import TraceRequest, read_trace

_CANNOT_BE_MET = 1  # exit code when the objectives cannot be met
_AUTO = "auto"
_DEFAULT_RATE = 1.0  # requests per second


class PlanCommand(Settings, cli_prog_name="tandem plan", env_prefix="TANDEM_PLAN_", cli_shortcuts={"as-json": "json"}):
    """Compute the number of prefill and decode workers for a workload, the latencies of its users, and the cost.

    Times are predicted from data sheets and the typical shares of peak rates (--mfu, --mbu): replace these by measured
    ones. The exit code is 1 when no number of workers meets the objectives; the reason is printed.
    """

    model: str = Field(description="built-in model such as qwen3-8b, model directory, or Hugging Face name")
    hardware: str = Field(
        "h100", description="accelerator of prefill workers; values can be changed, as in h100,usd=1.9 or cpu,gb=32"
    )
    accelerators: int = Field(
        1, ge=1, le=64, description="accelerators of one prefill worker, over which its layers are split"
    )
    tp: str | None = Field(
        None,
        pattern="^(auto|1|2|4|8)$",
        description="ranks of a worker that share each layer, one an accelerator: 1, 2, 4 or 8; auto: searched for "
        "each pool; omitted: --accelerators",
    )
    pp: str = Field(
        "1",
        pattern="^(auto|[1-8])$",
        description="stages of layers of a worker, each of --tp ranks: 1 to 8; auto: 1, 2, 4 and 8 are searched for "
        "each pool; needs --tp",
    )
    decode_hardware: str | None = Field(None, description="accelerator of decode workers; omitted: as prefill")
    decode_accelerators: int | None = Field(
        None, ge=1, le=64, description="accelerators of one decode worker; omitted: as prefill"
    )
    link: str = Field(
        "rdma-400g", description="link between a prefill and a decode worker, such as tcp-25g or rdma-400g,share=0.6"
    )

    input_tokens: str = Field("2000", description="prompt tokens: N, LEAST-MOST or lognormal:MEDIAN,P90,MOST")
    output_tokens: str = Field("300", description="tokens of an answer, in the same format")
    trace: Path | None = Field(
        None, description="trace that gives lengths and mean rate: Mooncake .jsonl or Azure .csv; omitted: none"
    )
    prefix_hit: float = Field(0.0, ge=0, lt=1, description="share of prompt tokens found in a prefix cache")
    rate: list[float] = Field(
        [], description="requests a second; several, as 2,5,9: one plan for each; omitted: the mean of --trace"
    )

    ttft_ms: float = Field(1000.0, gt=0, description="objective: time to the first token, milliseconds")
    tpot_ms: float = Field(50.0, gt=0, description="objective: mean time of each further token, milliseconds")
    slo_share: float = Field(0.95, ge=0.5, lt=1, description="share of requests that must meet each objective")
    max_use: float = Field(0.85, gt=0, lt=1, description="maximum use of prefill workers' time and decode workers' KV")
    max_running: int = Field(256, ge=1, description="maximum requests that a decode worker runs at once")
    chunk_tokens: int = Field(2048, ge=1, description="prompt tokens of one step, after which KV is handed on")

    weight_bits: int | None = Field(
        None,
        ge=1,
        le=32,
        description="bits of one weight in memory; omitted: 16, or a quantised checkpoint's own",
    )
    kv_bits: int = Field(16, ge=1, le=32, description="bits of one number of KV in memory and on the link")
    products_8bit: bool | None = Field(
        None,
        description="matrix products run at the hardware's 8-bit rate; omitted: those of a checkpoint whose scheme is "
        "int8 on both sides",
    )
    mfu: float = Field(TYPICAL.mfu, gt=0, le=1, description="share of the peak FLOP/s that prompts reach")
    mbu: float = Field(TYPICAL.mbu, gt=0, le=1, description="share of the peak bandwidth that decode steps reach")
    reserve_share: float = Field(
        TYPICAL.reserve_share, ge=0, lt=1, description="share of memory that is used for neither weights nor KV"
    )

    speculate: str = Field(
        "off", description="drafter of decode workers: off, auto, ngram, suffix, draft=MODEL, mtp or eagle=DIR"
    )
    num_speculative_tokens: int = Field(
        7, ge=1, le=MAX_SPECULATIVE_TOKENS, description="the most drafts of one request in a step"
    )
    acceptance: float = Field(
        0.6, ge=0, le=1, description="share of drafts that are right, of those whose earlier ones were"
    )

    context: int | None = Field(
        None, ge=1, description="print what a context of so many tokens keeps and reads, and no plan; omitted: a plan"
    )
    as_json: bool = Field(False, description="print every figure as JSON instead of tables")
    figure: Path | None = Field(
        None, description="draw the roofline to this .svg, .png or .pdf (matplotlib); omitted: no"
    )

    @field_validator("input_tokens", "output_tokens")
    @classmethod
    def _check_lengths(cls, value: str) -> str:
        try:
            parse_lengths(value)
        except ConfigurationError as error:
            raise ValueError(str(error)) from error
        return value

    def run(self) -> int:
        """Print the plan; returns the exit code."""
        if self.context is not None:
            return self._print_context_memory(self.context)
        if self.figure:
            check_figure(self.figure)
        found, search = self._study()
        if self.figure:
            save_roofline(self.figure, found.site.prefill.model.name, roofs(found), marks(found))
        if self.as_json:
            value = {**study_as_json(found), "widths": None if search is None else group_sizes_as_json(search)}
            sys.stdout.write(json.dumps(value, indent=2) + "\n")
        else:
            if search is not None:
                print_group_sizes(_console(), search)
            print_study(_console(), found)
        return _CANNOT_BE_MET if any(choice.apart.problems for choice in found.choices) else 0

    def _print_context_memory(self, num_tokens: int) -> int:
        model = named_model(self.model, self.weight_bits, self.kv_bits)
        if self.as_json:
            sys.stdout.write(json.dumps(context_memory_as_json(model, num_tokens), indent=2) + "\n")
        else:
            print_context_memory(_console(), model, num_tokens)
        return 0

    def _study(self) -> tuple[Study, GroupSizeSearch | None]:
        model = named_model(self.model, self.weight_bits, self.kv_bits)
        recorded = list(read_trace(self.trace)) if self.trace else []
        rates = self.rate or [_mean_rate(recorded)]
        site_of = partial(self._site, model, self._profile(recorded))
        if self.tp is None:
            if self.pp != "1":
                raise ConfigurationError(f"--pp={self.pp} without --tp; give --tp=1, 2, 4, 8 or auto with it")
            prefill, decode = self.accelerators, self.decode_accelerators or self.accelerators
            return study(site_of(GroupSize(prefill), GroupSize(decode)), rates), None
        if self.accelerators != 1 or self.decode_accelerators is not None:
            raise ConfigurationError(f"--tp={self.tp} with --accelerators or --decode-accelerators; give one of them")
        widths, stages = (WIDTHS if each == _AUTO else (int(each),) for each in (self.tp, self.pp))
        if _AUTO not in (self.tp, self.pp):
            check_group(int(self.tp), int(self.pp))
            size = group_size_facts(model, GroupSize(int(self.tp), int(self.pp))).size
            return study(site_of(size, size), rates), None
        found = search_group_sizes(site_of, max(rates), sizes_of(widths, stages))
        return study(site_of(found.prefill, found.decode), rates), found

    def _site(self, model: ModelCost, profile: Profile, prefill: GroupSize, decode: GroupSize) -> DeploymentSite:
        """The planned deployment, with prefill and decode workers of these sizes and one accelerator for each rank."""
        prefilling = self._roofline(model, self.hardware, prefill)
        decoding = self._roofline(model, self.decode_hardware or self.hardware, decode)
        return DeploymentSite(
            prefill=replace(prefilling, drafts=self._prefill_drafts(model, prefill.num_ranks)),
            decode=replace(decoding, drafts=self._drafts(model, decode.num_ranks)),
            link=find_link(self.link),
            profile=profile,
            goals=self._goals(),
        )

    def _drafts(self, model: ModelCost, num_accelerators: int) -> PlannedDrafts | None:
        return planned_drafts(
            self.speculate,
            model,
            path=Path(self.model),
            weight_bits=self.weight_bits,
            acceptance=self.acceptance,
            most=self.num_speculative_tokens,
            num_accelerators=num_accelerators,
        )

    def _prefill_drafts(self, model: ModelCost, num_accelerators: int) -> PlannedDrafts | None:
        """Drafts for which prefill workers compute a head's state; None = they have no head, as with "auto"."""
        drafts = self._drafts(model, num_accelerators) if serves_prompts(self.speculate) else None
        return None if drafts is None or drafts.head is None else drafts

    def _roofline(self, model: ModelCost, hardware: str, size: GroupSize) -> Roofline:
        products_8bit = model.multiplies_int8 if self.products_8bit is None else self.products_8bit
        assumptions = Assumptions(
            mfu=self.mfu, mbu=self.mbu, reserve_share=self.reserve_share, products_8bit=products_8bit
        )
        return Roofline(
            model,
            find_accelerator(hardware),
            size.num_ranks,
            assumptions,
            num_stages=size.num_stages,
            chunk_tokens=self.chunk_tokens,
        )

    def _profile(self, recorded: Sequence[TraceRequest]) -> Profile:
        if recorded:
            lengths = ((request.num_prompt_tokens, request.num_output_tokens) for request in recorded)
            return sample_profile(lengths, self.prefix_hit)
        return draw_profile(parse_lengths(self.input_tokens), parse_lengths(self.output_tokens), self.prefix_hit)

    def _goals(self) -> Goals:
        return Goals(
            ttft_ms=self.ttft_ms,
            tpot_ms=self.tpot_ms,
            share=self.slo_share,
            max_use=self.max_use,
            max_running=self.max_running,
            chunk_tokens=self.chunk_tokens,
        )


def _console() -> Console:
    return Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)


def _mean_rate(recorded: Sequence[TraceRequest]) -> float:
    """Mean request rate of a trace; one request per second if there is none."""
    if not recorded:
        return _DEFAULT_RATE
    span_s = recorded[-1].arrival_s - recorded[0].arrival_s
    return len(recorded) / span_s if span_s > 0 else _DEFAULT_RATE
