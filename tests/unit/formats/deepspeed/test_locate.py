from functools import partial
from pathlib import Path

import pytest
from ucp_formats.deepspeed.names import list_folder, locate_tag, require_folder

from ucp.errors import MalformedError, UnknownFormatError, UsageError

locate_native, locate_universal = partial(locate_tag, universal=False), partial(locate_tag, universal=True)
MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"


def native(path: Path) -> Path:
    path.mkdir(parents=True)
    for name in (MODEL, OPTIMIZER):
        (path / name).write_bytes(b"")
    return path


def universal(path: Path) -> Path:
    (path / "zero" / "a.weight").mkdir(parents=True)
    (path / "zero" / "a.weight" / "fp32.pt").write_bytes(b"")
    (path / MODEL).write_bytes(b"")
    return path


def test_latest_is_followed(tmp_path: Path) -> None:
    native(tmp_path / "global_step5")
    native(tmp_path / "global_step6")
    (tmp_path / "latest").write_text("global_step5\n")
    found = locate_native(tmp_path)
    assert found.root == tmp_path / "global_step5"
    assert found.reasons[0] == "latest -> global_step5"


def test_a_tag_may_be_nested_but_not_leave_the_folder(tmp_path: Path) -> None:
    native(tmp_path / "a" / "b")
    native(tmp_path / "outside")
    save = tmp_path / "a"
    (save / "latest").write_text("b")
    assert locate_native(save).root == save / "b"
    (tmp_path / "latest").write_text("a/b")
    assert locate_native(tmp_path).root == tmp_path / "a" / "b"
    (save / "latest").write_text("../outside")
    with pytest.raises(MalformedError, match=r"/latest .*'../outside'"):
        require_folder(locate_native(save), save)


def test_a_pointer_that_is_no_text_says_so(tmp_path: Path) -> None:
    native(tmp_path / "global_step5")
    (tmp_path / "latest").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(MalformedError, match=r"(?s)/latest .*text.*global_step5"):
        require_folder(locate_native(tmp_path), tmp_path)


def test_several_tags_without_latest_are_listed(tmp_path: Path) -> None:
    native(tmp_path / "global_step5")
    native(tmp_path / "global_step6")
    found = locate_native(tmp_path)
    assert found is not None, "it is of this format, and reading it says what is wrong"
    with pytest.raises(UsageError, match=r"2 checkpoints(.|\n)*global_step5\n.*global_step6"):
        require_folder(found, tmp_path)


def test_a_latest_that_names_nothing_is_an_error_that_lists_what_is_there(tmp_path: Path) -> None:
    native(tmp_path / "global_step5")
    (tmp_path / "latest").write_text("global_step9")
    with pytest.raises(MalformedError, match=r"(?s)'global_step9'.*global_step5"):
        require_folder(locate_native(tmp_path), tmp_path)
    assert locate_native(tmp_path / "global_step5").root == tmp_path / "global_step5"


def test_folders_of_others_are_not_claimed(tmp_path: Path) -> None:
    assert locate_native(tmp_path) is None
    assert locate_universal(tmp_path) is None
    (tmp_path / "iter_0000001" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "latest").write_text("iter_0000001")
    assert locate_native(tmp_path) is None
    assert locate_native(tmp_path / "model.safetensors") is None
    with pytest.raises(UnknownFormatError, match="global_step100"):
        require_folder(None, tmp_path)


@pytest.mark.parametrize("pointer", ["latest_universal", "latest", None])
def test_a_universal_folder_is_found_three_ways(tmp_path: Path, pointer: str | None) -> None:
    tag = universal(tmp_path / "global_step5_universal")
    if pointer:
        (tmp_path / pointer).write_text(tag.name)
    for path in (tmp_path, tag):
        assert locate_universal(path).root == tag
        assert locate_native(path) is None


def test_native_comes_first_where_latest_names_it(tmp_path: Path) -> None:
    native(tmp_path / "global_step5")
    universal(tmp_path / "global_step5_universal")
    (tmp_path / "latest").write_text("global_step5")
    (tmp_path / "latest_universal").write_text("global_step5_universal")
    assert locate_native(tmp_path).root.name == "global_step5"
    assert locate_universal(tmp_path) is None
    assert locate_universal(tmp_path / "global_step5_universal") is not None


def test_universal_comes_first_where_only_its_pointer_is_there(tmp_path: Path) -> None:
    native(tmp_path / "global_step5")
    universal(tmp_path / "global_step5_universal")
    (tmp_path / "latest_universal").write_text("global_step5_universal")
    assert locate_native(tmp_path) is None
    assert locate_universal(tmp_path).root.name == "global_step5_universal"


def test_parts_of_a_split_file_count_once_and_ranks_are_numbers(tmp_path: Path) -> None:
    names = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 2, 10, 100)]
    for name in (*(f"{names[0]}-{part}.2" for part in range(2)), *names[1:], "notes.txt"):
        (tmp_path / name).write_bytes(b"")
    folder = list_folder(tmp_path)
    assert [file.dp for file in folder.files] == [0, 2, 10, 100]
    assert folder.strays == ("notes.txt",)
