from __future__ import annotations

import pytest
from ucp_formats.deepspeed.read.optimizer.saved import number_of_enum

from ucp.errors import MalformedError
from ucp.io.pickle.values import GlobalName, Stub

ENUM = Stub(GlobalName("deepspeed.runtime.zero.config", "ZeroStageEnum"), (3,), new=False)


def test_stages_are_numbers_or_enum_members() -> None:
    assert number_of_enum(ENUM, "here") == number_of_enum(3, "here") == 3
    with pytest.raises(MalformedError):
        number_of_enum(Stub(GlobalName("m", "E")), "here")
