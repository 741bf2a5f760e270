"""Whether the states of an MoE model fit on GPUs, hosts and disks, if only busy experts stay on GPUs (MoESys eq. 1).

    GPUs:  (2 w + 2 g + 12) D + 4 alpha S / L  <=  memory of a GPU x GPUs        with 2 w + 2 g = 4: 16 D
    hosts: 16 alpha S                          <=  memory of a host x hosts
    disks: 12 S                                <=  disk of a host x hosts

D and S are parameters outside experts and of experts, L layers with experts, alpha the share of expert states that are
kept near: one layer's weights and gradients are on GPUs at a time, masters and moments of all experts on disks.
"""

from __future__ import annotations

from dataclasses import dataclass

_DENSE_NBYTES = 16
"""Bytes of a dense parameter on GPUs: weight, gradient (2 each), master and two moments."""
_SPARSE_GPU_NBYTES = 4
"""Bytes of an expert's parameter on GPUs: weight and gradient."""
_SPARSE_HOST_NBYTES = 16
"""Bytes of an expert's parameter in hosts."""
_SPARSE_DISK_NBYTES = 12
"""Bytes of an expert's parameter on disks: master and two moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """Bytes that an MoE model takes, and the largest share of expert states that can be kept near."""

    gpu_nbytes: float
    """Bytes on all GPUs, with `share` near."""
    host_nbytes: float
    """Bytes in the memory of all hosts, with `share` near."""
    disk_nbytes: float
    """Bytes on all disks."""
    share: float
    """Share of expert states near GPUs, 0 to 1: the largest that fits."""
    fits: bool
    """Whether it fits at all."""


def plan_residency(
    *, params_dense: float, params_expert: float, moe_layers: float, gpu_nbytes: float, host_nbytes: float,
    disk_nbytes: float,
) -> Residency:  # fmt: skip
    """The largest share of expert states that can be kept near. `*_nbytes`: of all GPUs, hosts and disks together."""
    dense, disk = _DENSE_NBYTES * params_dense, _SPARSE_DISK_NBYTES * params_expert
    per_layer = _SPARSE_GPU_NBYTES * params_expert / moe_layers
    host = _SPARSE_HOST_NBYTES * params_expert
    shares = [1.0]
    if params_expert:
        shares += [(gpu_nbytes - dense) / per_layer, host_nbytes / host]
    share = max(0.0, min(shares))
    return Residency(
        gpu_nbytes=dense + share * per_layer,
        host_nbytes=share * host,
        disk_nbytes=disk,
        share=share,
        fits=dense <= gpu_nbytes and disk <= disk_nbytes,
    )
