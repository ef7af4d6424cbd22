"""The two hosts of the cluster tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.hosts import TwoHosts, two_hosts, why_not


@pytest.fixture(scope="session")
def can_make_hosts() -> None:
    """Skips, with the reason, where network namespaces cannot be made."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def hosts(can_make_hosts: None) -> Iterator[TwoHosts]:
    """Two hosts and the link between them."""
    with two_hosts() as pair:
        yield pair
