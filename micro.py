import time

import torch

torch.set_num_threads(1)
aten = torch.ops.aten
x = torch.randn(2, 12)
p = torch.nn.Parameter(torch.randn(12, 12))
g = torch.randn(2, 12)
w = torch.ones(12)
bb = torch.zeros(12)


def bench(name, f, n=20000):
    for _ in range(500):
        f()
    best = 1e9
    for _ in range(5):
        s = time.perf_counter()
        for _ in range(n // 5):
            f()
        best = min(best, (time.perf_counter() - s) / (n // 5))
    return best * 1e6


fs = {
    "empty": lambda: None,
    "view meth": lambda: x.view([24]),
    "view list var": lambda: x.view(24),
    "aten.view": lambda: aten.view.default(x, [24]),
    "t param": lambda: p.t(),
    "mm": lambda: x.mm(p),
    "add": lambda: x.add(g),
    "mul2": lambda: x.mul(g),
    "addmm aten": lambda: aten.addmm.default(w, x, p),
    "torch.addmm": lambda: torch.addmm(w, x, p),
    "ln": lambda: aten.native_layer_norm.default(x, [12], w, bb, 1e-5),
    "torch.native_layer_norm": lambda: torch.native_layer_norm(x, [12], w, bb, 1e-5),
    "tensor op fast": lambda: aten.gelu.default(x),
    "nn gelu": lambda: torch._C._nn.gelu(x),
    "_op direct": lambda: aten.gelu.default._op(x),
    "as_strided": lambda: aten.as_strided.default(x, [24], [1], 0),
}


def run():
    return {k: bench(k, f) for k, f in fs.items()}


with torch.no_grad():
    a = run()
with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
    b = run()
with torch.inference_mode():
    c = run()
for k in fs:
    print(f"{k:26s} no_grad {a[k]:.2f} below {b[k]:.2f} inf {c[k]:.2f}")
