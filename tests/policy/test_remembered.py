"""Sessions that are kept for tenants: nobody's bounds are another's, and nothing is ever counted twice or lost."""

from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from evenflow.policy import remembered
from evenflow.policy.remembered import Remembered, Session


def session(size: int = 10, used_s: float = 0.0) -> Session:
    return Session([], size, 0, used_s)


def test_what_is_kept_is_found_until_it_is_forgotten_or_old() -> None:
    kept = Remembered()
    assert kept.get("a", 1, 0.0) is None
    assert kept.keep("a", 1, session())
    assert kept.get("a", 1, 3600.0) is not None
    assert kept.get("b", 1, 0.0) is None
    assert kept.get("a", 1, 3601.0) is None  # and with that it is forgotten
    assert (len(kept), kept.size) == (0, 0)
    kept.keep("a", 2, session(used_s=0.0))
    kept.keep("a", 3, session(used_s=100.0))
    kept.each_second(3650.0)
    assert [kept.get("a", number, 3650.0) is None for number in (2, 3)] == [True, False]


def test_one_too_large_is_not_kept_and_what_was_there_is_gone() -> None:
    kept = Remembered()
    kept.keep("a", 1, session())
    assert not kept.keep("a", 1, session(remembered.TENANT_BYTES_MAX + 1))
    assert kept.get("a", 1, 0.0) is None


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.integers(1, 60), st.booleans()), max_size=80
    )
)
def test_bounds_hold_and_counts_are_true(steps: list[tuple[str, int, int, bool]]) -> None:
    with (
        patch.object(remembered, "SESSIONS_MAX", 4),
        patch.object(remembered, "TENANT_BYTES_MAX", 100),
        patch.object(remembered, "BYTES_MAX", 220),
    ):
        kept = Remembered()
        for now, (tenant, number, size, forget) in enumerate(steps):
            if forget:
                kept.forget(tenant, number)
            else:
                kept.keep(tenant, number, session(size, float(now)))
                assert kept.get(tenant, number, float(now)) is not None  # the newest never goes
            sessions = kept._sessions
            assert kept.size == sum(one.size for one in sessions.values()) <= 220
            for name in "abc":
                own = [one.size for (owner, _), one in sessions.items() if owner == name]
                assert len(own) <= 4
                assert sum(own) <= 100
                assert kept._held.get(name, (0, 0)) == (len(own), sum(own))
