"""The compiled kernels for a test, or a skip that says why there are none."""

import pytest

from tandem.core.errors import ConfigurationError
from tandem.kernels.native.bindings import NativeKernels, load


def load_or_skip() -> NativeKernels:
    try:
        return load()
    except ConfigurationError as error:
        pytest.skip(str(error))
