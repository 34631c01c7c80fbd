"""Parses token counts of a command line: `256`, `64-512` or `lognormal:256,1024,4096` (median, 90th, maximum)."""

from tandem.core.errors import ConfigurationError, shown
from tandem.workload.lengths import Fixed, Lengths, LogNormal, Uniform

_LOG_NORMAL = "lognormal:"


def parse_lengths(text: str) -> Lengths:
    """The distribution that `text` names.

    Raises:
        ConfigurationError: it names none, or an impossible one.
    """
    try:
        if text.startswith(_LOG_NORMAL):
            median, p90, most = text.removeprefix(_LOG_NORMAL).split(",")
            return LogNormal(float(median), float(p90), int(most))
        least, dash, most = text.partition("-")
        return Uniform(int(least), int(most)) if dash else Fixed(int(least))
    except ValueError as error:
        raise ConfigurationError(
            f"{shown(text)} is no token count; write 256, 64-512 or lognormal:MEDIAN,P90,MOST"
        ) from error
