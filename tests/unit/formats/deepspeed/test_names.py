import pytest
from ucp_formats.deepspeed.experts import ExpertNumbers
from ucp_formats.deepspeed.names import Role, parse_name


@pytest.mark.parametrize(
    ("name", "role", "dp", "mp", "prefix"),
    [
        ("mp_rank_00_model_states.pt", Role.MODEL, 0, 0, ""),
        ("mp_rank_123_model_states.pt", Role.MODEL, 0, 123, ""),
        ("zero_pp_rank_0_mp_rank_00_model_states.pt", Role.SHARDED_MODEL, 0, 0, ""),
        ("zero_pp_rank_1023_mp_rank_07_model_states.pt", Role.SHARDED_MODEL, 1023, 7, ""),
        ("zero_pp_rank_3_mp_rank_00_optim_states.pt", Role.OPTIMIZER, 3, 0, ""),
        ("bf16_zero_pp_rank_100_mp_rank_00_optim_states.pt", Role.OPTIMIZER, 100, 0, "bf16_"),
        ("fp16_zero_pp_rank_3_mp_rank_00_optim_states.pt", Role.OPTIMIZER, 3, 0, "fp16_"),
        ("zero_pp_rank_3_mp_rank_00optim_states.pt", Role.OPTIMIZER, 3, 0, ""),
        ("layer_00-model_00-model_states.pt", Role.LAYER, 0, 0, ""),
        ("layer_17-model_states.pt", Role.LAYER, 0, 0, ""),
        ("layer_0_expert_3_mp_rank_00_model_states.pt", Role.EXPERT, 0, 0, ""),
        ("expert_3_mp_rank_01_model_states.pt", Role.EXPERT, 0, 1, ""),
        ("expp_rank_1_mp_rank_00_optim_states.pt", Role.EXPERT_OPTIMIZER, 0, 0, ""),
    ],
)
def test_every_form(name: str, role: Role, dp: int, mp: int, prefix: str) -> None:
    found = parse_name(name)
    assert found is not None
    assert (found.role, found.name, found.dp, found.mp, found.prefix) == (role, name, dp, mp, prefix)


@pytest.mark.parametrize(
    ("name", "layer", "expert", "tp", "label"),
    [
        ("layer_00-model_states.pt", 0, 0, 0, "pipeline layer 0"),
        ("layer_103-model_01-model_states.pt", 103, 0, 1, "pipeline layer 103, tensor-parallel rank 1"),
        ("layer_2_expert_13_mp_rank_00_model_states.pt", 2, 13, 0, "expert 13 of layer 2"),
        ("expert_3_mp_rank_01_model_states.pt", -1, 3, 0, "expert 3 of layer 0, model-parallel rank 1"),
        ("expp_rank_4_mp_rank_00_optim_states.pt", -1, 4, 0, "optimizer states of experts, expert-parallel rank 4"),
        ("mp_rank_02_model_states.pt", -1, 0, 0, "model states, model-parallel rank 2"),
        ("zero_pp_rank_5_mp_rank_02_optim_states.pt", -1, 0, 0, "optimizer states of rank 5, model-parallel rank 2"),
    ],
)
def test_numbers_and_labels(name: str, layer: int, expert: int, tp: int, label: str) -> None:
    found = parse_name(name)
    assert found is not None
    assert (found.layer, found.expert, found.tp, found.label) == (layer, expert, tp, label)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "latest",
        "zero_to_fp32.py",
        "pytorch_model.bin",
        "model.safetensors",
        "mp_rank_00",
        "mp_rank_xx_model_states.pt",
        "mp_rank_00_model_states.pt.tmp",
        "my_mp_rank_00_model_states.pt",
        "fp32_zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "bf16_zero_pp_rank_0_mp_rank_00_model_states.pt",
        "zero_pp_rank_0_mp_rank_00_optim_states.pt-1",
        "rng_state_0.pth",
    ],
)
def test_other_names_are_no_part_of_it(name: str) -> None:
    assert parse_name(name) is None


def test_a_name_with_a_huge_expert_number_costs_no_memory() -> None:
    """Anybody can write such a name; the experts below it are not counted out one by one."""
    experts = ExpertNumbers.of(["moe.deepspeed_experts.1.w", "moe.deepspeed_experts.999999999999.w"])
    assert experts.missing[:2] == ("moe.deepspeed_experts.0", "moe.deepspeed_experts.2")
    assert len(experts.missing) == 1000
