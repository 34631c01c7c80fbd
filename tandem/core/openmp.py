"""Makes PyTorch's OpenMP threads sleep while they wait, without affecting other programs.

By default they spin for milliseconds after every operation, on cores that the kernels' own threads and the gateway
need. OpenMP reads `OMP_WAIT_POLICY` once, when PyTorch loads it. The variable is set only while PyTorch is imported,
since other programs that this process starts would inherit it.
"""

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_VARIABLE, _POLICY = "OMP_WAIT_POLICY", "passive"
_LOADING = "torch"


class _QuietLoading(MetaPathFinder):
    """Import hook that sets the variable while PyTorch is loaded."""

    def __init__(self) -> None:
        self._is_asking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _LOADING or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None:
            self._change(spec)
        return spec

    def _change(self, spec: ModuleSpec) -> None:
        """Wraps loading in setting the variable. NOTE: the loader's type stays the same, since others look at it."""
        loader = spec.loader
        assert loader is not None
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            os.environ[_VARIABLE] = _POLICY
            try:
                load(module)
            finally:
                os.environ.pop(_VARIABLE, None)

        vars(loader)["exec_module"] = exec_module


def quieten() -> None:
    """Installs the import hook, unless PyTorch is loaded already or the variable is set."""
    if _VARIABLE in os.environ or _LOADING in sys.modules:
        return
    if not any(isinstance(finder, _QuietLoading) for finder in sys.meta_path):
        sys.meta_path.insert(0, _QuietLoading())
