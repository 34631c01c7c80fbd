"""One answer under way, as the engine keeps it: a scheduler request, its text, and when things happened to it."""

from dataclasses import dataclass, field

from tandem.core.output import RequestMetrics
from tandem.core.types import FinishReason, TokenLogprobs
from tandem.engine.text_stream import TextPiece, TextStream
from tandem.scheduler.request import Request
from tandem.text.grammars import CompiledGrammar


@dataclass(slots=True)
class Choice:
    """Times are seconds of the engine's clock; None until it has happened. `grammar` is held here for the masks."""

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
        """Times of its stages."""
        return RequestMetrics(
            arrival_s=self.arrival_s,
            first_scheduled_s=self.first_scheduled_s,
            first_token_s=self.first_token_s,
            last_token_s=self.last_token_s,
            num_prompt_tokens=self.request.num_prompt_tokens,
            num_output_tokens=self.request.num_output_tokens,
            num_cached_tokens=self.request.num_cached_tokens,
            num_preemptions=self.request.num_preemptions,
            pins=self.request.granted_pins,
            num_drafted=self.request.num_drafted,
            num_accepted=self.request.num_accepted,
        )
