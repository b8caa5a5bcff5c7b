"""GPU types and the rates that lower bounds are computed with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU at the clocks of its data sheet.

    gigabytes_per_second: memory. l2_megabytes: as the device reports it.
    teraflops: dense bf16 (T4: fp16) tensor products summed in fp32, which GeForce cards and GB10 do at half the rate
        that is advertised for fp16.
    checked_against: a public page with these figures, beside NVIDIA's data sheets.
    """

    recipe: str
    name: str
    sm: str
    gigabytes_per_second: float
    teraflops: float
    l2_megabytes: int
    checked_against: str


_TABLE = "llmbook.apartsin.com, appendix G.1"
_SHEETS = "sysrqmts.com, card's page"
GPUS = (
    Gpu("t4", "T4", "7.5", 320, 65, 4, _SHEETS),
    Gpu("a100", "A100 80GB SXM", "8.0", 2039, 312, 40, "glennklockwood.com/garden/processors/A100"),
    Gpu("a10", "A10", "8.6", 600, 125, 6, f"{_SHEETS} (memory, L2); 72 SMs x 1024 x 1.695 GHz"),
    Gpu(
        "rtx3090", "RTX 3090", "8.6", 936, 71, 6, "half of 142 (fp16), holynerdvana.blogspot.com, 2022-11-01"
    ),
    Gpu("l40s", "L40S", "8.9", 864, 362, 96, _TABLE),
    Gpu("rtx4090", "RTX 4090", "8.9", 1008, 165, 72, "waredb.com/processor/nvidia-geforce-rtx-4090"),
    Gpu("h100", "H100 SXM", "9.0", 3350, 989, 50, _TABLE),
    Gpu("h200", "H200 SXM", "9.0", 4800, 989, 50, _TABLE),
    Gpu("b200", "B200", "10.0", 8000, 2250, 126, _TABLE),
    Gpu("rtx5090", "RTX 5090", "12.0", 1792, 210, 96, "a quarter of 838 (sparse fp16), spheron.network/blog"),
    Gpu(
        "dgx-spark",
        "DGX Spark",
        "12.1",
        273,
        62,
        24,
        "1/16 of 1 PFLOP sparse fp4; 60 measured, banandre.com",
    ),
)
