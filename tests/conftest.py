"""Time limits: every test has one (pyproject.toml); those that start engines or are marked slow get more."""

import pytest

LONG_TEST_S = 300


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        is_long = item.get_closest_marker("slow") or item.get_closest_marker("engine")
        if is_long and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG_TEST_S))
