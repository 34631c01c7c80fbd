"""Versions of the wire protocol that this release speaks, and the choice of the one to use with a peer.

A change that an older peer would misread gets a new number. A release still speaks the number before its own, so that
two neighbouring releases work together during a rolling update; version 1 is an exception.
"""

from tandem.core.errors import IncompatibleProtocolError

PROTOCOL_VERSION = 2
OLDEST_PROTOCOL = 2
WITHOUT_SESSIONS = 1  # NOTE: it sent a token with every call and had no handshake, so it is not spoken any more

SPOKEN = (OLDEST_PROTOCOL, PROTOCOL_VERSION)


def newest_common(theirs: tuple[int, int], ours: tuple[int, int] = SPOKEN) -> int:
    """The highest version in both ranges.

    Raises:
        IncompatibleProtocolError: there is none.
    """
    newest = min(theirs[1], ours[1])
    if newest < max(theirs[0], ours[0]):
        raise IncompatibleProtocolError(
            f"the caller speaks protocols {described(theirs)}, this process {described(ours)}; run releases of Tandem "
            "that are at most one apart"
        )
    return newest


def described(spoken: tuple[int, int]) -> str:
    """Text of a range of versions, for messages."""
    return f"{spoken[0]} to {spoken[1]}"
