"""Base class of token mixers: defaults for mixers without options of attention."""

from typing import Self

from tandem.architecture.state import StateSpec
from tandem.architecture.tensors import TensorSpec


class BareMixer:
    """Base of all mixer specs. Those that have one of the options have a field of its name.

    NOTE: `rope` is not among them: a dataclass would take a property here for the default of its field.
    """

    __slots__ = ()

    @property
    def reads_state_of(self) -> int | None:
        """Index of the earlier layer whose state it reads; None = it reads its own."""
        return None

    def state(self, dtype: str) -> StateSpec | None:
        """The only state that it keeps when stored as `dtype`; None = it keeps none, or several."""
        return None

    def states(self, dtype: str) -> tuple[StateSpec, ...]:
        """All that it keeps; their number depends on nothing but the mixer."""
        state = self.state(dtype)
        return () if state is None else (state,)

    @property
    def softcap(self) -> float:
        """Bound of attention scores: they become `softcap * tanh(score / softcap)`; 0 = none."""
        return 0.0

    @property
    def sinks(self) -> TensorSpec | None:
        """Attention sinks, [num_heads]: a score of each head that has no value; None = none."""
        return None

    def limited(self, length: int) -> Self:
        """The same for sequences of at most `length` tokens."""
        return self
