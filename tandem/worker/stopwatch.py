"""Measures the stages of one request in this worker, for its timeline."""

from tandem.core.clock import Clock
from tandem.core.draft_counts import DraftCounts
from tandem.core.machine import wall_s
from tandem.core.output import RequestOutput
from tandem.core.timeline import Stage


class Stopwatch:
    """Measures stages; other objects may add theirs to `stages`. Times start at the wall clock's time of arrival and
    advance by `clock`, so that durations stay positive when the wall clock is set back.
    """

    def __init__(self, process: str, before_first_token: str, clock: Clock, num_ranks: int = 1) -> None:
        """`before_first_token`: name of the stage from leaving the queue to the first token. `num_ranks`: of the
        worker, told where there are several.
        """
        self._width: dict[str, str | int | float] = {} if num_ranks == 1 else {"num_ranks": num_ranks}
        self._clock = clock
        self.stages: list[Stage] = []
        self._before_first_token = before_first_token
        self._process = process
        self._arrived_s = wall_s()
        self._offset_s = self._arrived_s - clock.now_s()
        self._chunk_s = self._arrived_s
        self._num_chunk_tokens = 0
        self._first_s: float | None = None
        self._last_s = self._arrived_s
        self._told_first = False

    def chunk(self, num_tokens: int) -> None:
        """Records that the prompt has been computed up to `num_tokens`."""
        now_s = self._now_s()
        attributes = {"num_tokens": num_tokens - self._num_chunk_tokens}
        self.stages.append(Stage("prefill chunk", self._process, self._chunk_s, now_s - self._chunk_s, attributes))
        self._chunk_s, self._num_chunk_tokens = now_s, num_tokens

    def token(self, output: RequestOutput) -> float | None:
        """Records the arrival of tokens; returns the seconds since the previous ones, None for the first."""
        if not output.token_ids:
            return None
        now_s = self._now_s()
        gap_s = None if self._first_s is None else now_s - self._last_s
        if self._first_s is None:
            self._first_s = now_s
            self.stages.append(Stage("first token", self._process, now_s, 0.0))
        self._last_s = now_s
        return gap_s

    def until_first_token(self, output: RequestOutput) -> tuple[Stage, ...]:
        """The stages so far; call with the first token only."""
        if self._told_first or not output.token_ids:
            return ()
        self._told_first = True
        return tuple(self.stages)

    def all_stages(self, output: RequestOutput) -> tuple[Stage, ...]:
        """All stages, with the last output; includes the engine's figures."""
        metrics = output.metrics
        if metrics is None:
            return tuple(self.stages)
        attributes: dict[str, str | int | float] = {
            "num_prompt_tokens": metrics.num_prompt_tokens,
            "num_cached_tokens": metrics.num_cached_tokens,
            **self._width,
        }
        if metrics.first_scheduled_s is not None:
            queued_s = metrics.first_scheduled_s - metrics.arrival_s
            self.stages.append(Stage("queue", self._process, self._arrived_s, queued_s, attributes))
            if metrics.first_token_s is not None:
                began_s, took_s = self._arrived_s + queued_s, metrics.first_token_s - metrics.first_scheduled_s
                self.stages.append(Stage(self._before_first_token, self._process, began_s, max(0.0, took_s)))
        if self._first_s is not None:
            decoded = {
                "num_tokens": metrics.num_output_tokens,
                "num_preemptions": metrics.num_preemptions,
                **draft_attributes(metrics.drafts),
                **self._width,
            }
            self.stages.append(Stage("decode", self._process, self._first_s, self._last_s - self._first_s, decoded))
        return tuple(sorted(self.stages, key=lambda stage: stage.start_s))

    def _now_s(self) -> float:
        return self._offset_s + self._clock.now_s()


def draft_attributes(drafts: DraftCounts | None) -> dict[str, str | int | float]:
    """Attributes of a decode stage for its drafts; none without any."""
    if drafts is None:
        return {}
    return {
        "num_steps": drafts.num_steps,
        "num_drafted": drafts.num_drafted,
        "num_accepted": drafts.num_accepted,
        "accepted_by_position": drafts.by_position,
        "tokens_per_step": round(drafts.tokens_per_step, 2),
        "time_saved_s": drafts.saved_s or 0.0,
    }
