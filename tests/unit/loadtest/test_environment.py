"""The machine is named."""

from tandem.loadtest.environment import describe_environment


def test_the_circumstances_are_known() -> None:
    found = describe_environment()
    assert found["date"].endswith("+00:00")
    assert found["num_cpus"] >= 1
    assert found["memory_bytes"] > 1 << 20
    assert all(found[name] for name in ("tandem", "python", "system", "cpu"))
