"""The pause of the search for cycles."""

import gc

import pytest

from ucp.source.read import pause_gc


@pytest.mark.parametrize("was_on", [True, False])
def test_what_was_is_restored(*, was_on: bool) -> None:
    before = gc.isenabled()
    try:
        gc.enable() if was_on else gc.disable()
        with pytest.raises(ValueError, match="seen False"):
            paused_and_failing()
        assert gc.isenabled() is was_on
    finally:
        gc.enable() if before else gc.disable()


def paused_and_failing() -> None:
    with pause_gc():
        raise ValueError(f"seen {gc.isenabled()}")


def test_garbage_of_the_caller_stays_young() -> None:
    """What a library makes old, Python searches for cycles only after a long time."""
    gc.collect()
    cycle: list[object] = []
    cycle.append(cycle)
    with pause_gc():
        pass
    assert any(value is cycle for value in gc.get_objects(generation=0))
