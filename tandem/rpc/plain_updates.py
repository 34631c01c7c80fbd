"""Merges consecutive plain updates of one request while they wait to be read or sent.

A plain update has tokens and text only. Others are never merged: the first token is seen before later ones, and
generated tokens reach the client before the error that ends its request. Invariant: no information is lost.
"""

from tandem.core.output import RequestOutput
from tandem.rpc.messages import GenerateUpdate


def is_plain(update: GenerateUpdate) -> bool:
    """Whether an update has tokens and text of the only choice, and nothing else."""
    output = update.output
    return (
        output.metrics is None
        and output.finish_reason is None
        and not update.timeline
        and output.logprobs is None
        and output.prompt_logprobs is None
        and output.index == 0
    )


def merged(first: GenerateUpdate, second: GenerateUpdate) -> GenerateUpdate:
    """Merges two plain updates."""
    before, after = first.output, second.output
    output = RequestOutput(before.request_id, 0, before.token_ids + after.token_ids, before.text + after.text)
    return GenerateUpdate(output)
