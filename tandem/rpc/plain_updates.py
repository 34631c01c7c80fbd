"""Merges consecutive plain updates (`GenerateUpdate`) of one request on a shared stream.

`shared_outbox` does so while updates wait to be sent, `shared_stream` while they wait to be read. A plain update has
tokens and text only. Others, such as those with a timeline, logprobs or the finish reason, are passed on one by one.
Invariant: no information is lost, and the order stays.
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
    """One update with the tokens and the text of both, in order. Both must be plain and of one request."""
    before, after = first.output, second.output
    output = RequestOutput(before.request_id, 0, before.token_ids + after.token_ids, before.text + after.text)
    return GenerateUpdate(output)
