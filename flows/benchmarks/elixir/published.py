"""Holds the tables of the Elixir paper as data: TFLOPS of each configuration, or None where it ran out of memory.

Tables 7 and 8 have all numbers with one decimal; Tables 2 and 3 repeat some of them, rounded down.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

COLUMNS = ("elixir", "megatron", "fsdp", "zero_2", "zero_3", "zero_2_offload", "zero_3_offload")
"""Engines of Tables 7 and 8, in their order."""


@dataclass(frozen=True)
class PublishedRow:
    """One row of Table 7 or 8.

    Attributes:
        machine: name of the machine.
        model: name of the model.
        ranks: number of GPUs.
        batch: sequences for each GPU.
        tflops: TFLOPS of each engine, None where it ran out of memory.
        speedup: of Elixir over the best of all others, as printed; None where none of them ran.
    """

    machine: str
    model: str
    ranks: int
    batch: int
    tflops: dict[str, float | None]
    speedup: float | None


# Billions of parameters, GPUs, batch for each; then COLUMNS and the speed-up; "-" is out of memory.
TABLE_7 = """
4 1 4 62.0 - - - - 26.4 19.4 2.35
4 1 8 82.7 - - - - 46.3 40.5 1.79
4 1 12 102.5 - - - - 64.3 50.7 1.59
4 1 16 113.3 - - - - 77.6 60.6 1.46
4 2 4 137.3 138.0 - - 102.0 33.8 25.7 0.99
4 2 8 152.2 - - - 125.7 53.3 46.0 1.21
4 2 12 148.5 - - - - 73.6 64.3 2.02
4 2 16 145.8 - - - - 81.0 75.4 1.8
4 4 4 144.6 123.8 131.2 137.1 139.9 34.1 28.9 1.03
4 4 8 157.7 130.0 131.3 153.2 152.4 60.7 54.8 1.03
4 4 12 164.3 107.1 - 161.4 160.1 77.4 69.4 1.02
4 4 16 167.1 - - 164.9 162.5 91.4 89.2 1.01
10 1 4 47.9 - - - - 27.6 21.1 1.73
10 1 8 66.5 - - - - 46.5 39.1 1.43
10 1 12 88.0 - - - - 60.7 54.8 1.45
10 1 16 98.7 - - - - 80.7 65.9 1.22
10 2 4 64.6 - - - - 30.3 26.3 2.14
10 2 8 91.2 - - - - 55.9 49.0 1.63
10 2 12 103.8 - - - - 70.6 62.8 1.47
10 2 16 118.3 - - - - 80.4 75.6 1.47
10 4 4 112.6 - - - - 36.5 31.9 3.09
10 4 8 138.4 - - - - 60.3 55.3 2.3
10 4 12 136.3 - - - - 78.0 75.2 1.75
10 4 16 151.7 - - - - 92.0 88.8 1.65
15 1 4 42.0 - - - - - 19.2 2.19
15 1 8 77.6 - - - - - 37.1 2.09
15 1 12 93.6 - - - - - 63.4 1.48
15 1 16 107.8 - - - - - 64.6 1.67
15 2 4 59.7 - - - - - 27.0 2.21
15 2 8 96.4 - - - - - 55.7 1.73
15 2 12 109.7 - - - - - 69.6 1.58
15 2 16 128.5 - - - - - 87.3 1.47
15 4 4 97.7 - - - - - 35.0 2.79
15 4 8 129.1 - - - - - 62.8 2.05
15 4 12 144.3 - - - - - 82.2 1.76
15 4 16 151.0 - - - - - 102.5 1.47
20 1 4 42.0 - - - - - 18.9 2.22
20 1 8 69.4 - - - - - 36.6 1.9
20 1 12 86.2 - - - - - 48.8 1.77
20 1 16 108.4 - - - - - 63.2 1.71
20 2 4 55.5 - - - - - 25.0 2.22
20 2 8 89.0 - - - - - 47.0 1.89
20 2 12 113.6 - - - - - 64.5 1.76
20 2 16 130.5 - - - - - 78.1 1.67
20 4 4 91.8 - - - - - 33.6 2.73
20 4 8 124.0 - - - - - 60.2 2.06
20 4 12 141.2 - - - - - 79.4 1.78
20 4 16 146.5 - - - - - 95.1 1.54
"""

TABLE_8 = """
4 1 4 131.7 140.5 135.3 - 122.6 32.2 16.0 0.94
4 1 8 147.1 155.8 148.3 - 140.3 54.1 28.6 0.94
4 1 12 155.0 166.6 155.6 - 150.0 86.1 45.5 0.93
4 1 16 158.4 167.7 158.3 - 155.3 82.4 53.9 0.94
4 2 4 136.5 137.6 130.1 126.8 129.1 35.3 27.3 0.99
4 2 8 150.6 149.0 144.5 144.0 143.7 72.5 41.1 1.01
4 2 12 157.4 153.1 152.6 152.8 151.5 84.8 59.8 1.03
4 2 16 161.4 152.5 155.6 156.5 154.5 89.7 69.7 1.03
4 4 4 114.4 79.0 106.5 92.0 109.4 38.3 27.7 1.05
4 4 8 137.4 98.0 131.0 119.2 131.6 59.5 52.2 1.04
4 4 12 147.9 99.2 141.3 133.4 140.1 78.7 67.2 1.05
4 4 16 155.0 99.2 146.3 141.2 147.5 89.0 90.6 1.05
10 1 4 56.0 - - - - 33.9 14.1 1.65
10 1 8 84.8 - - - - 58.6 29.1 1.45
10 1 12 102.1 - - - - 73.1 43.9 1.4
10 1 16 110.3 - - - - 88.7 55.0 1.24
10 2 4 130.3 - - - - 38.4 26.1 3.39
10 2 8 145.6 - - - - 72.8 46.7 2.0
10 2 12 144.4 - - - - 88.8 62.8 1.63
10 2 16 154.9 - - - - 108.0 66.5 1.43
10 4 4 124.8 112.8 - - 108.8 40.8 29.4 1.11
10 4 8 145.5 116.1 - - 140.4 65.0 57.5 1.04
10 4 12 153.2 113.7 - - 146.2 86.4 71.9 1.05
10 4 16 164.3 105.8 - - 158.2 89.4 87.0 1.04
15 1 4 47.6 - - - - 36.7 18.9 1.3
15 1 8 77.3 - - - - 62.3 30.1 1.24
15 1 12 94.2 - - - - 82.1 41.1 1.15
15 1 16 108.9 - - - - 98.6 57.2 1.1
15 2 4 90.0 - - - - 40.3 29.8 2.23
15 2 8 104.3 - - - - 83.0 47.5 1.26
15 2 12 133.5 - - - - 87.0 72.2 1.53
15 2 16 139.9 - - - - 116.6 79.8 1.2
15 4 4 126.4 142.3 - - 117.4 41.3 33.1 0.89
15 4 8 150.4 138.2 - - 148.5 66.1 60.5 1.01
15 4 12 167.1 - - - 163.9 84.1 75.0 1.02
15 4 16 175.7 - - - 164.3 102.4 93.3 1.07
20 1 4 48.0 - - - - - 15.5 3.1
20 1 8 73.0 - - - - - 30.4 2.4
20 1 12 95.8 - - - - - 42.8 2.24
20 1 16 105.7 - - - - - 61.2 1.73
20 2 4 63.3 - - - - - 25.3 2.5
20 2 8 101.5 - - - - - 48.4 2.1
20 2 12 117.4 - - - - - 61.9 1.9
20 2 16 129.6 - - - - - 78.2 1.66
20 4 4 103.0 - - - - - - -
20 4 8 139.6 - - - - - - -
20 4 12 151.3 - - - - - - -
20 4 16 161.7 - - - - - - -
"""

TABLE_2 = """
1 4b 82 - - 46 147 155 148 140
1 10b 66 - - 46 84 - - 58
1 15b 77 - - 37 77 - - 62
1 20b 69 - - 36 73 - - 30
2 4b 152 - - 125 150 148 144 144
2 10b 91 - - 55 145 - - 72
2 15b 96 - - 55 104 - - 83
2 20b 89 - - 46 101 - - 48
4 4b 157 129 131 153 137 97 130 131
4 10b 138 - - 60 145 116 - 130
4 15b 129 - - 62 150 138 - 148
4 20b 123 - - 60 139 - - -
"""

TABLE_3 = """
4b 4 144 123 131 139 114 79 106 109
4b 12 164 107 - 153 147 99 141 140
4b 16 167 - - 164 154 99 146 147
10b 4 112 - - 36 124 112 - 108
10b 12 136 - - 77 153 113 - 146
10b 16 151 - - 91 164 105 - 158
15b 4 97 - - 34 126 142 - 117
15b 12 144 - - 82 167 138 - 163
15b 16 150 - - 102 175 - - 164
20b 4 91 - - 33 102 - - -
20b 12 141 - - 79 151 - - -
20b 16 146 - - 95 161 - - -
"""
# GPUs and model (batch 8), or model and batch (4 GPUs); then Elixir, Megatron, FSDP and the best of DeepSpeed on either
# machine, rounded down.


def published_rows() -> Iterator[PublishedRow]:
    """Yield all rows of Tables 7 and 8."""
    for machine, table in (("A100 40GB SXM", TABLE_7), ("A100 80GB PCIe", TABLE_8)):
        for line in table.split("\n"):
            words = line.split()
            if words:
                values = [None if word == "-" else float(word) for word in words[3:]]
                cells = dict(zip(COLUMNS, values, strict=False))
                yield PublishedRow(machine, f"GPT2-{words[0]}b", int(words[1]), int(words[2]), cells, values[-1])


DEEPSPEED = ("zero_2", "zero_3", "zero_2_offload", "zero_3_offload")
"""DeepSpeed's settings; Tables 2 and 3 have the best of them."""


def best_of_deepspeed(tflops: Mapping[str, float | None]) -> float | None:
    """Return the TFLOPS of the best setting, None where none of them ran."""
    return max((found for engine in DEEPSPEED if (found := tflops[engine]) is not None), default=None)
