"""Base of token mixers: the answers of one without options of attention."""

from typing import Self

from tandem.architecture.tensors import TensorSpec


class BareMixer:
    """Base of all mixer specs. Those that have one of the options have a field of its name.

    NOTE: `rope` is not among them: a dataclass would take a property here for the default of its field.
    """

    __slots__ = ()

    @property
    def reads_state_of(self) -> int | None:
        """The layer before whose state is read; None = its own."""
        return None

    @property
    def softcap(self) -> float:
        """Bound of its scores; 0 = none."""
        return 0.0

    @property
    def sinks(self) -> TensorSpec | None:
        """Scores without a value; None = it has none."""
        return None

    def limited(self, length: int) -> Self:
        """The same for sequences of at most `length` tokens."""
        return self
