"""A choice: one answer under way (a request with `n` > 1 has several), as the engine tracks it.

Joins the scheduler's request with the answer's text stream and the times at which its stages were reached.
"""

from dataclasses import dataclass, field

from tandem.core.output import RequestMetrics, RequestOutput
from tandem.core.types import FinishReason, TokenLogprobs
from tandem.engine.text_stream import TextPiece, TextStream
from tandem.scheduler.request import Request
from tandem.text.grammars import CompiledGrammar


@dataclass(slots=True)
class Choice:
    """One answer of a caller's request. Times are seconds of the engine's clock; None until they are reached.

    Args:
        parent_id: the caller's request id.
        index: number of the answer.
        text: None = no text is made.
        grammar: held here so that it stays compiled while masks need it.
    """

    parent_id: str
    index: int
    request: Request
    text: TextStream | None
    arrival_s: float
    grammar: CompiledGrammar | None
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    def note_token(self, now_s: float) -> None:
        """Record when a token was chosen."""
        self.last_token_s = now_s
        if self.first_token_s is None:
            self.first_token_s = now_s

    def text_piece(self, token_id: int) -> TextPiece:
        """The text to show for a token. The token that stopped a request is shown only if the caller wants it."""
        if self.text is None:
            return TextPiece("")
        request = self.request
        stopped_by_token = request.finish_reason is FinishReason.STOP
        is_eos = stopped_by_token and request.stop_reason is None
        if is_eos or (stopped_by_token and not request.params.include_stop_str_in_output):
            return TextPiece(self.text.flush().text)
        piece = self.text.add(token_id)
        if request.finish_reason is not None and piece.matched is None:
            rest = self.text.flush()
            piece = TextPiece(piece.text + rest.text, rest.matched)
        return piece

    def metrics(self) -> RequestMetrics:
        """Times, counts of tokens and use of the prefix cache so far."""
        return RequestMetrics(
            arrival_s=self.arrival_s,
            first_scheduled_s=self.first_scheduled_s,
            first_token_s=self.first_token_s,
            last_token_s=self.last_token_s,
            num_prompt_tokens=self.request.num_prompt_tokens,
            num_output_tokens=self.request.num_output_tokens - self.request.num_resumed_tokens,
            num_cached_tokens=self.request.num_cached_tokens,
            num_preemptions=self.request.num_preemptions,
            pins=self.request.granted_pins,
            drafts=self.request.tally.counts if self.request.tally.drafted_at else None,
        )

    def output(self, token_ids: tuple[int, ...], text: str, logprobs: TokenLogprobs | None) -> RequestOutput:
        """Output for the caller with these new tokens. `logprobs`: of the token, if there is exactly one."""
        request = self.request
        finished = request.finish_reason is not None
        num_new = request.num_output_tokens - request.num_resumed_tokens
        is_empty = request.finish_reason is FinishReason.STOP and num_new == 0
        is_first = is_empty or (bool(token_ids) and num_new == 1)
        wants_prompt = request.params.prompt_logprobs is not None
        return RequestOutput(
            request_id=self.parent_id,
            index=self.index,
            token_ids=token_ids,
            text=text,
            logprobs=None if logprobs is None else (logprobs,),
            prompt_logprobs=(None, *self.prompt_logprobs) if is_first and wants_prompt else None,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            metrics=self.metrics() if finished or is_first else None,
        )
