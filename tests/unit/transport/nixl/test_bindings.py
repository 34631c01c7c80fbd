"""Messages where NIXL is missing or unknown, without NIXL."""

import os
import subprocess
import sys
from pathlib import Path

from tandem.transport.nixl.bindings import ENVIRONMENT_DEFAULTS, SUPPORTED_VERSIONS

ROOT = Path(__file__).parents[4]
IMPORT = "import sys; sys.path[:0] = {paths!r}\n"
WITHOUT_WHEEL = """
import importlib.util, sys
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.startswith("nixl") else real(name, *rest)
from tandem.transport.nixl.bindings import load_bindings
from tandem.transport.choose import Site
from tandem.core.errors import ConfigurationError
print(Site.here("cpu").nixl)
try:
    load_bindings()
except ConfigurationError as error:
    print(error)
print("torch" in sys.modules, "grpc" in sys.modules)
"""


def run_python(code: str, **environment: str) -> str:
    finished = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | environment | {"PYTHONPATH": str(ROOT)},
        check=True,
    )
    return finished.stdout


def test_without_a_wheel_the_reason_says_what_to_install() -> None:
    reason, refusal, loaded = run_python(WITHOUT_WHEEL).splitlines()
    assert reason == refusal == f"no NIXL wheel is installed; pip install nixl-cu13=={SUPPORTED_VERSIONS[-1]}"
    assert loaded == "False False"


def test_settings_of_the_user_win_over_our_defaults() -> None:
    code = (
        "import os; from tandem.transport.nixl.bindings import set_environment_defaults as f; f();"
        "print(os.environ['UCX_LOG_LEVEL'], os.environ['UCX_TCP_KEEPCNT'])"
    )
    assert run_python(code, UCX_LOG_LEVEL="info").split() == ["info", ENVIRONMENT_DEFAULTS["UCX_TCP_KEEPCNT"]]


def test_the_seam_and_everything_but_the_pools_stay_light() -> None:
    """Modules that the gateway and the router may import load no libraries for tensors or wires."""
    code = (
        "import sys, tandem.transport.base, tandem.transport.choose, tandem.transport.measure, tandem.transport.card;"
        "print([name for name in ('torch', 'grpc', 'numpy', 'nixl_cu13') if name in sys.modules])"
    )
    assert run_python(code).strip() == "[]"
