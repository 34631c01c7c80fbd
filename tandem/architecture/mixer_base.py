"""Base class of token mixers (attention and its alternatives), with defaults for options that a mixer does not have."""

from typing import Self

from tandem.architecture.state import StateSpec
from tandem.architecture.tensors import TensorSpec


class BareMixer:
    """Base of all mixer specs: properties with the value of an absent option. A mixer that has the option has a
    dataclass field of the same name.

    NOTE: `rope` is not among them: a dataclass would take a property here for the default of its field.
    """

    __slots__ = ()

    @property
    def reads_state_of(self) -> int | None:
        """Index of the earlier layer whose state this mixer reads; None = it reads its own."""
        return None

    def state(self, dtype: str) -> StateSpec | None:
        """The only state of the mixer, stored as `dtype`; None = it keeps none, or several."""
        return None

    def states(self, dtype: str) -> tuple[StateSpec, ...]:
        """All states that the mixer keeps, stored as `dtype`; their number depends only on the mixer."""
        state = self.state(dtype)
        return () if state is None else (state,)

    @property
    def softcap(self) -> float:
        """Bound of attention scores: they become `softcap * tanh(score / softcap)`; 0 = none."""
        return 0.0

    @property
    def sinks(self) -> TensorSpec | None:
        """Attention sinks, [num_heads]: for each head a further score in the softmax that has no value; None = none."""
        return None

    def limited(self, length: int) -> Self:
        """This spec for sequences of at most `length` tokens."""
        return self
