from __future__ import annotations

import pytest
from ucp_formats.deepspeed.read.optimizer.saved import stage_of

from ucp.errors import MalformedError
from ucp.io.pickle.values import GlobalName, Stub

ENUM = Stub(GlobalName("deepspeed.runtime.zero.config", "ZeroStageEnum"), (3,), new=False)


def test_stages_are_numbers_or_enum_members() -> None:
    assert stage_of({"zero_stage": ENUM}) == stage_of({"zero_stage": 3}) == 3
    with pytest.raises(MalformedError):
        stage_of({"zero_stage": Stub(GlobalName("m", "E"))})
