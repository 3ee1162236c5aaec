"""Tables of a GPT-like training step and of a plan for it, made by replay: sizes and times as in a real one."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from stowage.stages.ir.graph import SHARED, Block, ComputeNode
from stowage.stages.ir.plan import Option, PlanRow, PlanSummary
from stowage.stages.ir.run import MemorySample, StepRecord
from stowage.stages.ir.trace import Storage, StorageRole

MIB = 1 << 20
# Name, MiB of the result, milliseconds, whether backward reads it; the last is the block's output.
LAYERS = (
    ("ln_1", 3.0, 3.0, True),
    ("qkv", 9.0, 26.0, True),
    ("attention", 3.1, 30.0, True),
    ("proj", 3.0, 9.0, False),
    ("dropout", 3.8, 6.0, True),
    ("add", 3.0, 1.0, True),
    ("ln_2", 3.0, 3.0, True),
    ("fc", 12.0, 35.0, True),
    ("gelu", 12.0, 12.0, True),
    ("fc_out", 3.0, 34.0, False),
    ("dropout_2", 3.8, 6.0, True),
    ("add_2", 3.0, 1.0, True),
)
CHEAP = {"ln_1", "ln_2", "gelu"}


@dataclass
class Tables:
    """What `ReportTables` is made from."""

    storages: list[Storage] = field(default_factory=list)
    nodes: list[ComputeNode] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    options: list[Option] = field(default_factory=list)
    plan_rows: list[PlanRow] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    memory: list[MemorySample] = field(default_factory=list)
    summary: PlanSummary | None = None


class _Builder:
    def __init__(self, blocks: int, full: int, partial: int) -> None:
        self.tables = Tables()
        self.count, self.full, self.partial = blocks, full, partial
        self.forward: list[list[int]] = []
        self.backward: list[list[int]] = []
        self.shared = self.node("position ids", SHARED, "forward", 0.2, [], [self.storage("positions", 0.1)])

    def storage(self, name: str, size: float, role: StorageRole = "temporary") -> int:
        self.tables.storages.append(Storage(len(self.tables.storages), int(size * MIB), role, name))
        return len(self.tables.storages) - 1

    def node(
        self,
        name: str,
        block: int,
        phase: str,
        ms: float,
        reads: list[int],
        creates: list[int],
        mutates: tuple[int, ...] = (),
    ) -> int:
        k = len(self.tables.nodes)
        self.tables.nodes.append(
            ComputeNode(
                node=k, calls=(k,), reads=tuple(reads), creates=tuple(creates), mutates=mutates, phase=phase,  # type: ignore[arg-type]
                block=block, once=bool(mutates), random="dropout" in name, time_s=ms * 1e-3, workspace_bytes=MIB,
                estimated=False, name=name,
            )
        )  # fmt: skip
        return k

    def build(self) -> Tables:
        x = self.storage("input", 3.0, "input")
        inputs: list[dict[str, int]] = []
        weights = [self.storage(f"h.{b}.weight", 27.0, "parameter") for b in range(self.count)]
        states = [self.storage(f"h.{b}.weight::moments", 54.0, "state") for b in range(self.count)]
        for b in range(self.count):
            made: dict[str, int] = {"input": x}
            mine = []
            for name, size, ms, _ in LAYERS:
                out = self.storage(f"h.{b}.{name}", size)
                mine.append(self.node(f"h.{b}.{name}", b, "forward", ms, [x, weights[b]], [out]))
                made[name] = x = out
            self.forward.append(mine)
            inputs.append(made)
        gradient = self.storage("loss gradient", 3.0)
        loss = self.node("loss", self.count - 1, "forward", 60.0, [x], [gradient])
        self.forward[-1].append(loss)
        for b in reversed(range(self.count)):
            mine = []
            for name, _, ms, read in reversed(LAYERS):
                out = self.storage(f"h.{b}.{name}.gradient", 3.0)
                reads = [gradient, weights[b], *([inputs[b][name]] if read else [])]
                mine.append(self.node(f"h.{b}.{name} backward", b, "backward", 1.9 * ms, reads, [out]))
                gradient = out
            update = self.node(f"update h.{b}.weight", b, "update", 14.0, [gradient], [], (weights[b], states[b]))
            self.backward.insert(0, [*mine, update])
        self._blocks()
        self._plan()
        return self.tables

    def _blocks(self) -> None:
        for b in range(self.count):
            own = [n for n in self.tables.nodes if n.block == b]
            last = b == self.count - 1
            self.tables.blocks.append(
                Block(
                    block=b, block_hash=("9b1f" if last else "4c7d") * 5, graph="{}", nodes=tuple(n.node for n in own),
                    storages=tuple(s for n in own for s in n.creates), label=f"transformer.h.{b}", resident_bytes=0,
                    consumed=(),
                )
            )  # fmt: skip
        for h in ("4c7d" * 5, "9b1f" * 5):
            for o, (save, again) in enumerate(((58.0, 0.0), (31.0, 27.0), (12.0, 46.0))):
                self.tables.options.append(
                    Option(
                        block_hash=h, option=o, forward=(0, 1, -1), backward=(2,),
                        formulation="rk_checkmate", status="optimal" if o else "feasible", gap=0.0 if o else 0.004,
                        forward_time_s=0.166, backward_time_s=0.33 + 0.001 * again, save_bytes=int(save * MIB),
                        forward_peak_bytes=70 * MIB, backward_peak_bytes=90 * MIB, recomputed_bytes=int(again * MIB),
                        last_run_time_s=0.496 + 0.001 * again, last_run_save_bytes=int(save * MIB),
                        last_run_forward_peak_bytes=70 * MIB, last_run_backward_peak_bytes=90 * MIB,
                    )
                )  # fmt: skip

    def _plan(self) -> None:
        tables, live, ran = self.tables, set[int](), set[int]()
        base = sum(s.nbytes for s in tables.storages if s.role != "temporary")
        clock, used = 0.0, base

        def row(
            action: str, node: int, storage: int, block: int, step: str, again: bool, end: float, peak: int
        ) -> None:
            tables.plan_rows.append(
                PlanRow(len(tables.plan_rows), action, node, storage, block, step, again, clock, end, used, peak)  # type: ignore[arg-type]
            )

        def run(k: int, step: str) -> None:
            nonlocal clock, used
            node = tables.nodes[k]
            fresh = [s for s in node.creates if s not in live]
            live.update(fresh)
            used += sum(tables.storages[s].nbytes for s in fresh)
            end = clock + node.time_s
            row("compute", k, -1, node.block, step, k in ran, end, used + node.workspace_bytes)
            ran.add(k)
            clock = end

        def free(storages: list[int], step: str, block: int) -> None:
            nonlocal used
            for s in storages:
                if s in live:
                    live.discard(s)
                    used -= tables.storages[s].nbytes
                    row("free", -1, s, block, step, False, clock, used)

        run(self.shared, "F0 shared")
        for b, mine in enumerate(self.forward):
            how = "fast" if b < self.full else "option 1" if b < self.full + self.partial else "option 0"
            for k in mine:
                run(k, f"F{b} {how}")
                before = tables.nodes[k - 1].creates if k - 1 in mine else ()
                earlier = tables.nodes[k - 1].name.split(".")[-1]
                if how == "fast" or earlier in ("proj", "fc_out") or (how == "option 1" and earlier in CHEAP):
                    free(list(before), f"F{b} {how}", b)
        for b in reversed(range(self.count)):
            if b < self.full:
                for k in self.forward[b]:
                    run(k, f"F{b} option 0")
            elif b < self.full + self.partial:
                for k in self.forward[b]:
                    if tables.nodes[k].name.split(".")[-1] in CHEAP:
                        run(k, f"B{b} option 1")
            for k in self.backward[b]:
                run(k, f"B{b}")
                free([s for s in tables.nodes[k].reads if s in live], f"B{b}", b)
            free([s for k in self.forward[b] for s in tables.nodes[k].creates], f"B{b}", b)
        free(sorted(live), "end", SHARED)
        self._summary(base, clock)

    def _summary(self, base: int, clock: float) -> None:
        tables = self.tables
        once = sum(n.time_s for n in tables.nodes)
        forward = sum(s.nbytes for s in tables.storages if s.role == "temporary") // 2
        peak = max(r.peak_bytes for r in tables.plan_rows)
        tables.summary = PlanSummary(
            plan_hash="0f3c5a77e2d94b1886aa", configuration_hash="b82d40c19f6e5a7733c1", method="rk_rotor",
            device="Xeon, 2 cores", device_budget_bytes=int(peak * 1.03), device_peak_bytes=peak, baseline_bytes=base,
            step_time_s=clock, lower_bound_s=once, recomputed_bytes=self.full * 55 * MIB, activation_bytes=forward,
            keep_all_peak_bytes=base + int(1.1 * forward), keep_all_time_s=once,
            smallest_feasible_bytes=base + 200 * MIB,
            solver="OR-Tools CP-SAT 9.12", status="optimal", gap=0.004, time_limit_s=60.0, seed=0, estimated_nodes=2,
        )  # fmt: skip


def synthetic(blocks: int = 12, full: int = 5, partial: int = 4, steps: int = 10) -> Tables:
    """A step of `blocks` blocks, of which the plan recomputes `full` wholly and `partial` in part."""
    tables = _Builder(blocks, full, partial).build()
    assert tables.summary is not None
    draw = random.Random(0)
    for i in range(steps):
        loss = 5.6 / (1 + 0.08 * i) + draw.uniform(-0.02, 0.02)
        first = i == 1
        tables.steps.append(
            StepRecord(
                i, loss, loss, 3e-4 * (1 - i / steps), tables.summary.step_time_s * draw.uniform(1.01, 1.06),
                tables.summary.lower_bound_s * draw.uniform(1.0, 1.05),
                int(tables.summary.device_peak_bytes * 1.004) if first else -1,
            )
        )  # fmt: skip
    if steps:
        clock = 0.0
        for r in tables.plan_rows:
            clock += (r.end_s - r.start_s) * 1.2 + 1e-5
            level = r.peak_bytes if r.action == "compute" else r.resident_bytes
            tables.memory.append(MemorySample("measured", clock, int(level * draw.uniform(0.995, 1.003))))
        base, top = tables.summary.baseline_bytes, tables.summary.keep_all_peak_bytes
        for i in range(2000):
            share = i / 1000 if i < 1000 else (2000 - i) / 1000
            tables.memory.append(MemorySample("eager", i * 1e-3, int(base + (top - base) * share)))
    return tables
