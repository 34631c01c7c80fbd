"""Plain updates of one request that wait for its reader, merged into one. Invariant: nothing that they say is lost.

What is more than tokens and text stays by itself: a first token is heard before those that follow, and what was
generated is the client's before its request is said to have failed.
"""

from tandem.core.output import RequestOutput
from tandem.rpc.messages import GenerateUpdate


def is_plain(update: GenerateUpdate) -> bool:
    """Whether there are tokens and text of a request's one choice, and nothing else."""
    output = update.output
    return (
        output.metrics is None
        and output.finish_reason is None
        and not update.timeline
        and output.logprobs is None
        and output.prompt_logprobs is None
        and output.index == 0
    )


def joined(first: GenerateUpdate, second: GenerateUpdate) -> GenerateUpdate:
    """Two plain ones as one."""
    before, after = first.output, second.output
    output = RequestOutput(before.request_id, 0, before.token_ids + after.token_ids, before.text + after.text)
    return GenerateUpdate(output)
