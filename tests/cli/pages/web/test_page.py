"""Pages for a browser, as files: what is in them, and that nothing in a checkpoint becomes part of the program."""

from __future__ import annotations

import json
import math
import re
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import ucp as library
from tests.cli.conftest import FIXTURES, Run
from ucp_cli.pages.web.contents import diff_contents

MIXTRAL = FIXTURES.parent / "megatron" / "mixtral-tp2-ep2-etp1-torch-zero" / "checkpoint"
EVIL = "</script><script>document.title='run'</script><img src=x onerror=alert(1)>"


class Parsed(HTMLParser):
    """Elements with their attributes, texts of scripts, and all text elsewhere."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._is_script = False
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._is_script = tag == "script"
        if self._is_script:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._is_script = False

    def handle_data(self, data: str) -> None:
        if self._is_script:
            self.scripts[-1] += data
        else:
            self.text += data

    @property
    def data(self) -> dict:
        return json.loads(self.scripts[0])


def names(data: dict) -> list[str]:
    pairs = zip(data["names"][::2], data["names"][1::2], strict=True)
    return [".".join(filter(None, (data["modules"][module], last))) for module, last in pairs]


def test_a_page_of_a_checkpoint(ucp: Run, zero3: Path, tmp_path: Path) -> None:
    printed = ucp("inspect", zero3).stdout
    assert ucp("inspect", zero3, "--html", tmp_path / "page.html").stdout == printed
    page = Parsed(tmp_path / "page.html")
    index = library.inspect(zero3)
    assert names(page.data) == list(index.atoms)
    for row in re.findall(r"^(\w+)  +(\S+)", printed, re.MULTILINE):
        assert all(word in page.text for word in row)
    (side,) = page.data["sides"]
    weight = next(name for name, atom in index.atoms.items() if atom.layout.flat)
    profile = side["profiles"][side["columns"][side["states"]["exp_avg"]][list(index.atoms).index(weight)]]
    assert side["meshes"][profile["mesh"]]["axes"] == [["dp", 4]]
    assert sum(count * numel for _, count, numel in profile["runs"]) >= math.prod(index.atoms[weight].global_shape)


def test_a_plan_has_both_layouts(ucp: Run, zero3: Path, tmp_path: Path) -> None:
    asked = ("plan", zero3, "--to", "deepspeed", "--topology", "dp=2,zero=1")
    assert ucp(*asked, "--html", tmp_path / "p.html").stdout == ucp(*asked).stdout
    assert "layouts" in json.loads(ucp(*asked, "--json").stdout)
    source, target = Parsed(tmp_path / "p.html").data["sides"]
    assert {json.dumps(mesh["axes"]) for mesh in source["meshes"]} == {'[["dp", 4]]'}
    assert {json.dumps(mesh["axes"]) for mesh in target["meshes"]} == {'[["dp", 2]]'}
    assert min(target["columns"][target["states"]["exp_avg"]]) == -1, "frozen parameters have no such state"


def test_a_tensor_that_is_made_of_others_has_no_layout_of_its_own(ucp: Run, tmp_path: Path) -> None:
    llama = FIXTURES.parent / "megatron" / "llama-tp2-pp2-dp2-full" / "checkpoint"
    asked = ("--to", "deepspeed", "--names", "huggingface", "--topology", "dp=2,tp=2,zero=1")
    ucp("plan", llama, *asked, "--html", tmp_path / "p.html")
    data = Parsed(tmp_path / "p.html").data
    source, target = data["sides"]
    column, number = (
        source["columns"][source["states"]["weight"]],
        names(data).index("model.layers.0.self_attn.q_proj.weight"),
    )
    assert column[number] == -1
    assert "linear_qkv" in dict(data["looks"][data["look"][number]]["facts"])["made of"]
    assert min(target["columns"][target["states"]["weight"]]) >= 0, "names of the target"


def test_a_diff_has_norms(ucp: Run, tmp_path: Path) -> None:
    values = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    for name, plus in (("a", 0.0), ("b", 2.0)):
        tensors = {"layers.0.w": values + plus, "layers.0.b": values[0] + plus, "layers.10.w": values, "head": values}
        torch.save({**tensors, "head": values + plus * 1.5}, tmp_path / f"{name}.pt")
    ucp("diff", tmp_path / "a.pt", tmp_path / "b.pt", "--html", tmp_path / "d.html", code=3)
    report = library.diff(tmp_path / "a.pt", tmp_path / "b.pt")
    assert {change.param: change.norm for change in report.changes} == {
        "layers.0.w": pytest.approx(2 * 12**0.5),
        "layers.0.b": pytest.approx(4.0),
        "head": pytest.approx(3 * 12**0.5),
    }
    norms = diff_contents(report).norms
    assert norms is not None
    total = f"{(4 * 16 + 9 * 12) ** 0.5:.3g}"
    assert norms.columns == ("layer", ">weight")
    assert norms.rows == (("all", total), ("head", f"{3 * 12**0.5:.3g}"), ("layers.0", "8"))
    page = Parsed(tmp_path / "d.html")
    assert total in page.text
    assert sorted(names(page.data)) == ["head", "layers.0.b", "layers.0.w"]
    document = json.loads(ucp("diff", tmp_path / "a.pt", tmp_path / "b.pt", "--json", code=3).stdout)
    assert {change["param"]: change["norm"] for change in document["changes"]}["layers.0.b"] == 4.0


def test_a_norm_that_is_no_number_is_a_text(ucp: Run, tmp_path: Path) -> None:
    torch.save({"w": torch.tensor([1.0, 2.0])}, tmp_path / "a.pt")
    torch.save({"w": torch.tensor([float("nan"), 2.0])}, tmp_path / "b.pt")
    outcome = ucp("diff", tmp_path / "a.pt", tmp_path / "b.pt", "--json", "--html", tmp_path / "d.html", code=3)
    (change,) = json.loads(outcome.stdout)["changes"]
    assert (change["largest"], change["norm"]) == ("nan", "nan")
    assert "nan" in Parsed(tmp_path / "d.html").text


def test_equal_checkpoints_have_a_page(ucp: Run, zero3: Path, tmp_path: Path) -> None:
    ucp("diff", zero3, zero3, "--html", tmp_path / "d.html")
    page = Parsed(tmp_path / "d.html")
    assert page.data["names"] == []
    assert "equal; " in page.text


def test_a_checkpoint_that_cannot_be_read_has_a_page(ucp: Run, copy: Path, tmp_path: Path) -> None:
    for file in copy.rglob("*model_states.pt"):
        file.write_bytes(b"not a checkpoint")
    outcome = ucp("inspect", copy, "--html", tmp_path / "i.html", code=1)
    page = Parsed(tmp_path / "i.html")
    assert outcome.stderr.removeprefix("Error: ").splitlines()[0] in page.text
    assert "zero_pp_rank_3_mp_rank_00_model_states.pt" in page.text
    assert page.data == {}


def test_the_experts_are_on_the_page(ucp: Run, tmp_path: Path) -> None:
    printed = ucp("inspect", MIXTRAL, "--experts", "--html", tmp_path / "e.html").stdout
    assert printed.startswith(f"{MIXTRAL}/iter_0000010, step 10")
    experts = Parsed(tmp_path / "e.html").data["experts"]
    assert [layer["count"] for layer in experts["layers"]] == [4, 4, 4, 4]
    assert [*experts["layers"][0]["cells"]] == ["0", "1", "2", "3"]
    ucp("inspect", MIXTRAL, "--html", tmp_path / "plain.html")
    assert "experts" not in Parsed(tmp_path / "plain.html").data


def test_names_are_data(ucp: Run, tmp_path: Path) -> None:
    torch.save({EVIL: torch.ones(2), "w\x1b[2J": torch.ones(2)}, tmp_path / "a.pt")
    torch.save({EVIL: torch.zeros(2)}, tmp_path / "b.pt")
    torch.save({EVIL: torch.zeros(2), "lone\udc80": torch.ones(2)}, tmp_path / "c.pt")
    ucp("inspect", tmp_path / "a.pt", "--html", tmp_path / "i.html")
    ucp("plan", tmp_path / "b.pt", "--html", tmp_path / "p.html")
    ucp("diff", tmp_path / "a.pt", tmp_path / "b.pt", "--html", tmp_path / "d.html", code=3)
    ucp("inspect", tmp_path / "c.pt", "--html", tmp_path / "s.html")
    for name in "ipds":
        page = Parsed(tmp_path / f"{name}.html")
        assert [attributes.get("type") for tag, attributes in page.tags if tag == "script"] == [
            "application/json",
            None,
        ]
        assert not [tag for tag, _ in page.tags if tag == "img"]
        assert not [key for _, attributes in page.tags for key in attributes if key.startswith("on")]
        assert EVIL in names(page.data)
        assert "\x1b" not in (tmp_path / f"{name}.html").read_text()


def test_a_name_with_more_digits_than_an_int_may_have(ucp: Run, tmp_path: Path) -> None:
    name = f"layers.{'9' * 5000}.w"
    for value, file in enumerate(("a.pt", "b.pt")):
        torch.save({name: torch.full((2,), float(value)), "layers.10.w": torch.ones(2)}, tmp_path / file)
    assert name in ucp("inspect", tmp_path / "a.pt", "--html", tmp_path / "i.html").stdout.replace("\n", "")
    ucp("diff", tmp_path / "a.pt", tmp_path / "b.pt", "--html", tmp_path / "d.html", code=3)
    assert names(Parsed(tmp_path / "d.html").data) == [name]


def test_only_the_program_of_the_page_may_run(ucp: Run, zero3: Path, tmp_path: Path) -> None:
    ucp("inspect", zero3, "--html", tmp_path / "page.html")
    page = Parsed(tmp_path / "page.html")
    (policy,) = [attributes["content"] for _, attributes in page.tags if attributes.get("http-equiv")]
    digest = b64encode(sha256(page.scripts[1].encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert not [attributes for _, attributes in page.tags if "src" in attributes]
    assert "http" not in page.scripts[1].replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize("file", ["page.pt", "missing/page.html", "."])
def test_a_page_goes_to_a_new_file(ucp: Run, zero3: Path, tmp_path: Path, file: str) -> None:
    assert "for the page" in ucp("inspect", zero3, "--html", tmp_path / file, code=2).stderr
    assert not [path for path in tmp_path.iterdir() if path.name != "t"]
