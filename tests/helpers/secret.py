"""The cluster secret of everything that tests start themselves."""

SECRET = b"shared by all processes of the tests"
