"""Paths that a setting names as text."""

from pathlib import Path

from tandem.core.errors import ConfigurationError, shown


def expanded(name: str) -> Path:
    """The path `name`, with the home directory in place of a leading `~` or `~user`. Nothing needs to be there.

    Raises:
        ConfigurationError: there is no such home directory, or whether anything is there cannot be found out.
    """
    try:
        path = Path(name).expanduser()
        path.stat()
    except RuntimeError as error:
        raise ConfigurationError(f"{shown(name)} names no user's home directory; write the path without ~") from error
    except (FileNotFoundError, NotADirectoryError):
        return path
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{shown(name)} cannot be looked up ({error}); check the name and permissions"
        ) from error
    return path
