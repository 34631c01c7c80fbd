"""Error for weights in pickles, a format that can carry code, if no setting allows them."""

from pathlib import Path

from tandem.core.errors import UnsupportedCheckpointError

ALLOW = "--allow-pickle (TANDEM_ALLOW_PICKLE=true)"  # setting, for messages


def pickle_refused(path: Path) -> UnsupportedCheckpointError:
    """The error for the weights in `path`."""
    return UnsupportedCheckpointError(
        f"{path} is a pickle, a format that can carry code; convert it to safetensors, or allow pickles by {ALLOW}, "
        "which reads nothing but tensors from them"
    )
