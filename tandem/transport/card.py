"""Card: signed message in which a worker tells peers its identity and how to reach its pool (its KV memory).

A card is `magic | format version | body | HMAC-SHA256 of all that`. It is verified in the order MAC, version, fields,
before any of it is used: some metadata is read by native code that damaged bytes can crash. A card that fails any of
these checks raises `IncompatiblePeerError`.
"""

import base64
import dataclasses
import hashlib
import hmac
import json
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tandem.core.errors import ConfigurationError, IncompatiblePeerError
from tandem.transport.base import MemoryPool

CARD_VERSION = 1  # of workers of one rank
RANKED_CARD_VERSION = 2  # of workers of several ranks; releases that read pools of one rank only refuse it
STAGED_CARD_VERSION = 3  # of workers whose ranks have some layers each; releases without stages refuse it
MIN_SECRET_BYTES = 16
MAX_CARD_BYTES = 1 << 20
_MAGIC = b"TKVC"
_MAC_BYTES = hashlib.sha256().digest_size
_HEADER_BYTES = len(_MAGIC) + 2
_ABSENT = "(absent)"


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of this process towards its peers.

    Args:
        compatibility: properties, by name, that must be equal on both sides for blocks to be exchanged.
        secret: shared by the cluster, at least `MIN_SECRET_BYTES`.
        incarnation: 32 hexadecimal digits, new for every process, which distinguish a restarted worker from its
            predecessor.
    """

    compatibility: Mapping[str, str]
    secret: bytes = field(repr=False)
    incarnation: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        if len(self.secret) < MIN_SECRET_BYTES:
            raise ConfigurationError(
                f"the cluster secret has {len(self.secret)} bytes; use at least {MIN_SECRET_BYTES} random ones"
            )

    def key(self, purpose: str) -> bytes:
        """Derives a key for one purpose, so that a MAC made for one purpose is invalid for others."""
        return hmac.digest(self.secret, f"tandem kv {purpose}".encode(), "sha256")


@dataclass(frozen=True, slots=True)
class Card:
    """Content of a verified card. `metadata` belongs to the transport, the numbers are those of the `MemoryPool`. Only
    workers of several ranks state `piece_bytes`; otherwise it follows from the compatible layout, and is among
    `compatibility` where earlier releases compute another.
    """

    transport: str
    incarnation: str
    page_bytes: int
    num_blocks: int
    compatibility: Mapping[str, str]
    metadata: bytes
    num_ranks: int = 1
    piece_bytes: int | None = None
    stages: tuple[int, ...] = ()

    def unit_bytes(self, pool: MemoryPool) -> int | None:
        """Bytes of the unit that reads of this peer into `pool` count in: a page if both sides have the same pages,
        else a piece of one; None = the pools have no unit in common.
        """
        if (self.num_ranks, self.stages) == (pool.num_ranks, pool.stages):
            return pool.page_bytes if self.page_bytes == pool.page_bytes else None
        return pool.piece_bytes if self.num_ranks == 1 or self.piece_bytes == pool.piece_bytes else None


def describe(transport: str, identity: Identity, pool: MemoryPool, metadata: bytes) -> Card:
    """Creates this process's own card."""
    return Card(
        transport=transport,
        incarnation=identity.incarnation,
        page_bytes=pool.page_bytes,
        num_blocks=pool.num_blocks,
        compatibility=dict(identity.compatibility),
        metadata=metadata,
        num_ranks=pool.num_ranks,
        piece_bytes=pool.piece_bytes,
        stages=pool.stages,
    )


def seal(card: Card, identity: Identity) -> bytes:
    """Returns the card's bytes with their MAC, to give to peers."""
    fields = asdict(card) | {"metadata": base64.b64encode(card.metadata).decode()}
    version = RANKED_CARD_VERSION
    if card.stages:
        version = STAGED_CARD_VERSION
    else:
        del fields["stages"]
    if card.num_ranks == 1:  # NOTE: former releases read it, and no field beside theirs
        version = CARD_VERSION
        del fields["num_ranks"], fields["piece_bytes"]
    signed = _MAGIC + version.to_bytes(2, "big") + json.dumps(fields, sort_keys=True).encode()
    return signed + hmac.digest(identity.key("card"), signed, "sha256")


def unseal(sealed: bytes, identity: Identity) -> Card:
    """Verifies a card's MAC and returns its content, without checking compatibility.

    Raises:
        IncompatiblePeerError: it is damaged, foreign, of another version or sealed with another secret.
    """
    if not _HEADER_BYTES + _MAC_BYTES < len(sealed) <= MAX_CARD_BYTES or not sealed.startswith(_MAGIC):
        raise IncompatiblePeerError(f"{len(sealed)} bytes starting with {sealed[:4]!r} are not a peer's card")
    signed, mac = sealed[:-_MAC_BYTES], sealed[-_MAC_BYTES:]
    if not hmac.compare_digest(mac, hmac.digest(identity.key("card"), signed, "sha256")):
        raise IncompatiblePeerError("a peer's card was damaged or sealed with another cluster secret than ours")
    version = int.from_bytes(signed[len(_MAGIC) : _HEADER_BYTES], "big")
    if not CARD_VERSION <= version <= STAGED_CARD_VERSION:
        raise IncompatiblePeerError(
            f"a peer's card has version {version}; this worker reads versions {CARD_VERSION} to {STAGED_CARD_VERSION}"
        )
    return _parse(json.loads(signed[_HEADER_BYTES:]))


def _parse(fields: dict[str, Any]) -> Card:
    """NOTE: a newer release may have added fields, an older one lacks those with a default."""
    known = {each.name: fields[each.name] for each in dataclasses.fields(Card) if each.name in fields}
    metadata = base64.b64decode(fields["metadata"], validate=True)
    return Card(**known | {"metadata": metadata, "stages": tuple(fields.get("stages", ()))})


def accept(sealed: bytes, transport: str, identity: Identity, pool: MemoryPool) -> Card:
    """Returns the verified card of a peer from which this process may read through `transport`.

    Raises:
        IncompatiblePeerError: as for `unseal`, or naming every field that differs with both sides' values.
    """
    card = unseal(sealed, identity)
    if card.incarnation == identity.incarnation:
        raise IncompatiblePeerError(f"incarnation {card.incarnation} is this worker itself; it cannot be its own peer")
    ours = describe(transport, identity, pool, b"")
    fields = _fields(card, ours) + (_sizes(card, ours) if card.unit_bytes(pool) is None else [])
    mismatches = [f"{name}: peer {theirs!r}, here {mine!r}" for name, theirs, mine in fields if theirs != mine]
    if mismatches:
        raise IncompatiblePeerError(f"peer {card.incarnation} cannot be read from: {'; '.join(mismatches)}")
    return card


def _fields(theirs: Card, ours: Card) -> list[tuple[str, object, object]]:
    """Returns (name, theirs, ours) of every field that must be equal."""
    fields: list[tuple[str, object, object]] = [("transport", theirs.transport, ours.transport)]
    names = sorted({*theirs.compatibility, *ours.compatibility})
    return fields + [
        (name, theirs.compatibility.get(name, _ABSENT), ours.compatibility.get(name, _ABSENT)) for name in names
    ]


def _sizes(theirs: Card, ours: Card) -> list[tuple[str, object, object]]:
    """Returns (name, theirs, ours) of the fields because of which two pools have no unit in common."""
    return [
        ("page_bytes", theirs.page_bytes, ours.page_bytes),
        ("num_ranks", theirs.num_ranks, ours.num_ranks),
        ("stages", theirs.stages, ours.stages),
        ("piece_bytes", theirs.piece_bytes, ours.piece_bytes),
    ]
