"""A small Kubernetes API server for tests: real HTTP on loopback, the part of the API that Tandem uses.

    async with running_fake() as fake:
        fake.put_pod("decode-0", ip="10.0.0.1", labels={"tandem.dev/role": "decode"}, ready=True)
        api = open_api(fake.access(), "default")

`tests/contract/test_kube.py` holds it to what a real control plane does. Everything lives in one event loop.
"""

from tests.helpers.kube_fake.server import KubeFake, Rule, running_fake

__all__ = ["KubeFake", "Rule", "running_fake"]
