from __future__ import annotations

from dataclasses import replace

import ucp
from tests.unit.conftest import handmade
from ucp.conversion.options import ConvertOptions
from ucp.store.format import StoreFormat
from ucp.testing import FormatContract, TargetContract


class TestStoreFormat(FormatContract):
    def make(self):
        return StoreFormat()

    def paths(self, folder):
        source = handmade(folder / "handmade")
        ucp.convert(source, folder / "packed")
        ucp.convert(source, folder / "per-parameter", layout="per-parameter")
        ucp.convert(source, folder / "compressed", compress=True)
        ucp.convert(source, folder / "virtual", virtual=True)
        return [folder / name for name in ("packed", "per-parameter", "compressed", "virtual", "packed/ucp.json")]

    def test_a_file_cut_short_is_an_expected_error(self, checkpoints, tmp_path):
        super().test_a_file_cut_short_is_an_expected_error(checkpoints[:-1], tmp_path)


class TestStoreTarget(TargetContract):
    def cases(self, folder):
        source = handmade(folder / "handmade")
        plain = ConvertOptions()
        return [
            (source, plain),
            (source, replace(plain, layout="per-parameter")),
            (source, replace(plain, compress=True)),
            (source, replace(plain, dtypes={"exp_avg": "bfloat16"})),
            (source, replace(plain, include=("embed", "n*"), exclude=("*/step",))),
        ]
