import time, statistics, sys, torch, dataclasses, gc
from stowage.stages.workload.models import build_model
from stowage.stages.workload.samples import sample_batch
from stowage.stages.trace import trace_step
from stowage.stages.partition.fold import fold
from stowage.stages.ir.costs import Cost
from stowage.stages.solve import keep_everything_at_once, PlanRequest
from stowage.stages.codegen import emit_step, manifest_of
from stowage.stages.runtime.bind import bind
torch.set_num_threads(1)
L=int(sys.argv[1]) if len(sys.argv)>1 else 12
def mk():
    m=build_model("gpt2",{"n_layer":L,"n_embd":12,"n_head":12,"vocab_size":16,"n_positions":8,"bos_token_id":0,"eos_token_id":0},seed=0)
    b=sample_batch(m,1,2,1)
    o=torch.optim.AdamW(m.parameters(),lr=1e-4,fused=True)
    return m,b,o
m,b,o=mk()
def plain():
    o.zero_grad(); l=m(**b).loss; l.backward(); o.step(); return l
m2,b2,o2=mk()
trace=trace_step(m2,b2,optimizer=o2)
costs={c.signature: Cost(c.signature,"",1e-3,0,0,1,"measured") for c in trace.calls}
nodes=list(fold(trace,costs).nodes)
gpu=dataclasses.replace(trace,meta=dataclasses.replace(trace.meta,device="cuda"))
s=keep_everything_at_once(gpu,nodes,PlanRequest(device_budget_bytes=10**10))
src=emit_step(trace,nodes,s.rows,s.summary,s.slots)
open("/tmp/ht/step_t.py","w").write(src)
prog=bind(src,manifest_of(src,"x","").source_hash,"/tmp/ht/step_t.py",trace,m2,o2)
for _ in range(5): plain(); prog(b2)
def t(fn,*a,n=41):
    ts=[]
    for _ in range(n):
        s=time.perf_counter(); fn(*a); ts.append(time.perf_counter()-s)
    return statistics.median(ts)
rr=[]
for r in range(7):
    a=t(plain,n=15); c=t(prog,b2,n=15); rr.append(c/a)
    print(f"plain {a*1e3:.2f} ms program {c*1e3:.2f} ratio {c/a:.2f}")
print("median",statistics.median(rr), len(trace.calls))
if len(sys.argv)>2:
    import cProfile,pstats
    p=cProfile.Profile(); p.enable()
    for _ in range(40): prog(b2)
    p.disable(); pstats.Stats(p).sort_stats("tottime").print_stats(22)
