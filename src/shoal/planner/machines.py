"""Usual machines, by the figures that are published of them. What products and streams reach of a peak is no published
figure: `reaches` of A100 and H100 are one number a device, such that the published rows of `benchmarks/planner` come
out right on average, and the others ours, until a run has been compared (`shoal plan --compare`)."""

from __future__ import annotations

from shoal.planner.cluster import Device, Host, Link

GB, GIB, T = 10**9, 2**30, 1e12

A100_SHEET = "nvidia.com: nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf (SXM, 80 GB)"
H100_SHEET = "nvidia.com: H100 datasheet (SXM5), dense figures as in glennklockwood.com/garden/processors/h100"
H200_SHEET = "nvidia.com: H200 datasheet (SXM)"
B200_SHEET = "nvidia.com: DGX B200 (1,440 GB and 64 TB/s for eight), dense figures of HGX B200 at 1,000 W"
L40S_SHEET = "nvidia.com: L40S datasheet (48 GB, 864 GB/s, PCIe Gen4)"
A910B_SOURCE = (
    "no datasheet is public; FP16 320 TFLOPS and 64 GB as reported (boardor.com/blog/huawei-ascend-910b-outperforms-"
    "h20-910c-approaches-h100); fp32, bandwidth, links and watts are assumed"
)


def _flops(half: float, fp32: float, fp64: float = 0.0, tf32: float = 0.0, fp8: float = 0.0) -> dict[str, float]:
    """Operations a second by format, from 10^12 of them, bf16 and fp16 `half` as wide; 0 where there are none."""
    rates = {"bf16": half, "fp16": half, "fp32": fp32, "fp64": fp64, "tf32": tf32, "fp8": fp8}
    return {name: rate * T for name, rate in rates.items() if rate}


MACHINES: dict[str, Host] = {
    "a100": Host(
        Device("a100", _flops(312, 19.5, 9.7, 156), 80 * GB, 2039e9,
               source=A100_SHEET, reaches=0.78),
        8, Link(8e-6, 300e9 * 0.8), 1024 * GIB, 25e9, disk=6e9, watts=400,
    ),
    "h100": Host(
        Device("h100", _flops(989.4, 66.9, 33.5, 494.7, 1978.9), 80 * GB, 3350e9,
               source=H100_SHEET, reaches=0.64),
        8, Link(8e-6, 450e9 * 0.8), 2048 * GIB, 50e9, disk=12e9, watts=700,
    ),
    "h200": Host(
        Device("h200", _flops(989.4, 66.9, 33.5, 494.7, 1978.9), 141 * GB, 4800e9,
               source=H200_SHEET, reaches=0.64),
        8, Link(8e-6, 450e9 * 0.8), 2048 * GIB, 50e9, disk=12e9, watts=700,
    ),
    "b200": Host(
        Device("b200", _flops(2250, 80, 40, 1125, 4500), 180 * GB, 8000e9,
               source=B200_SHEET, reaches=0.6),
        8, Link(8e-6, 900e9 * 0.8), 4096 * GIB, 50e9, disk=12e9, watts=1000,
    ),
    "l40s": Host(
        Device("l40s", _flops(362, 91.6, 1.43, 183, 733), 48 * GB, 864e9,
               source=L40S_SHEET, reaches=0.6),
        8, Link(15e-6, 32e9 * 0.7), 1024 * GIB, 25e9, disk=6e9, watts=350,
    ),
    "910b": Host(
        Device("910b", _flops(320, 80), 64 * GB, 1600e9,
               source=A910B_SOURCE, reaches=0.6),
        8, Link(12e-6, 150e9 * 0.8), 1536 * GIB, 25e9, disk=6e9, watts=310,
    ),
}  # fmt: skip
"""Hosts of eight. Links inside are half of the published two-way NVLink rate, times 0.8 for what collectives reach of
it (0.7 of PCIe's); their latency, the host's memory and disk, and what reaches the host (half of PCIe's two ways) are
those of usual hosts, assumed. None has a price: that is what the user pays (`price` of a cluster file)."""

BETWEEN = Link(15e-6, 50e9 * 0.8)
"""One network port of 400 Gb/s for each device, as in DGX H100 and B200, times 0.8."""
