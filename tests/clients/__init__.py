"""Tests of `make clients`. Not collected by default: environments are made, and clients installed."""
