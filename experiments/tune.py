import sys, ctypes, itertools
from pathlib import Path
import torch
import bench_retrieval as B
from trtkv.plugins._device import nvrtc
from trtkv.plugins._device.nvrtc import *
from trtkv.plugins.kv_select import launch as select
from trtkv.plugins.kv_attend import launch as attend
DEV='cuda'; torch.manual_seed(0); torch.zeros(1,device=DEV)
def null():
    for sm in (0,60000,150000):
        k=nvrtc.load(Path('null.cu').resolve(),'null_kernel',(Pointer,),(),'90',sm)
        for threads,cl,grid in ((128,1,64),(256,1,264),(1024,8,32),(1024,16,64),(128,16,64),(1024,2,128)):
            r=[]
            for ov in (False,True):
                r.append(B.time_graph(lambda i:k.launch((grid,1,1),threads,sm,select.stream(),(0,),cluster=cl,overlap=ov),50))
            print(f'null smem {sm} threads {threads} cluster {cl} grid {grid}: {r[0]:.2f} overlapped {r[1]:.2f}')
class Row:
    def __init__(s,name,unit=1):
        hq,s.hk,s.b,s.ctx,s.budget,*_=B.ROWS[name]; s.name=name; s.g=hq//s.hk; s.rows=s.b*s.hk
        s.sets=max(2,min(24,B.COLD//(s.rows*s.ctx*32)+1)); s.layers=[B.Layer(s.hk,s.b,s.ctx,32,False) for _ in range(s.sets)]
        s.q=torch.randn(s.b,hq*128,device=DEV).bfloat16(); s.lens=torch.full((s.b,),s.ctx-7,dtype=torch.int32,device=DEV); s.out=torch.empty_like(s.q)
        s.chosen=torch.full((s.b,s.hk,s.budget+1),-7,dtype=torch.int32,device=DEV); s.plan_for(2*132)
    def plan_for(s,slots):
        units=s.ctx; p=select.Scratch(s.g,units,select._parts(s.rows,units//32,slots)); s.plan=p; s.scores,s.parts=p.allocate(s.rows,DEV)
    def score(s,i,ov=False,pool='softmax-mean'):
        l=s.layers[i%s.sets]; select.fier_score(s.q,l.bits,l.meta,l.table,s.lens,s.scores,s.parts,page_size=32,budget=s.budget,scale=128**-.5,pooling=pool,overlap=ov)
    def select(s,i,ov=False,cl=0): select.select_units(s.scores,s.parts,s.lens,s.chosen,budget=s.budget,sink=0,window=0,unit=1,group=32,pooling='softmax-mean',cluster=cl,overlap=ov)
    def attend(s,i,ov=False,cl=0):
        l=s.layers[i%s.sets]; attend.attend_list(s.q,l.keys,l.values,l.table,s.lens,s.chosen,s.out,unit=1,scale=128**-.5,cluster=cl,overlap=ov)
def trace(kernel,blocks=1):
    from cuda.bindings import driver
    torch.cuda.synchronize(); err,ptr,size=driver.cuModuleGetGlobal(kernel._module,b'trace')
    buf=(ctypes.c_longlong*(64*32))(); driver.cuMemcpyDtoH(ctypes.addressof(buf),ptr,64*32*8); a=torch.tensor(list(buf)).view(64,32)
    return [[int(x) if x>=0 else 0 for x in (a[b,:12]-a[b,0]).tolist()] for b in range(blocks)]
orig=nvrtc.load
def patched(extra):
    def f(path,name,types,defines,arch,shared): return orig(path,name,types,tuple(defines)+tuple(extra),arch,shared)
    return f
def main():
    what=sys.argv[1].split(',')
    if 'null' in what: null()
    for name in sys.argv[2].split(','):
        r=Row(name)
        if 'score' in what:
            for res,st in ((2,8),(2,4)):
                nvrtc.load=patched((f'-DRESIDENT={res}',f'-DSTAGES={st}')); r.plan_for(res*132)
                select.score_kernel.__wrapped__ if False else None
                r.score(0); t=B.time_graph(r.score,max(12,r.sets)); print(f'{name} score resident {res} stages {st} parts {r.plan.parts}: {t:.2f}',flush=True)
            nvrtc.load=orig; r.plan_for(2*132)
        if 'pool' in what:
            for pool in ('mean','max'):
                keep=r.plan,r.scores,r.parts; r.plan=select.Scratch.plan(r.rows,r.g,pool,r.ctx,132); r.scores,r.parts=r.plan.allocate(r.rows,DEV)
                t=B.time_graph(lambda i:r.score(i,pool=pool),max(12,r.sets)); u=B.time_graph(lambda i:r.select(i),12); print(f'{name} pooling {pool}: score {t:.2f} select {u:.2f}',flush=True); r.plan,r.scores,r.parts=keep
        r.score(0)
        if 'select' in what:
            for cl in (16,8,4,3,2,1):
                if r.rows*cl>132 or r.ctx/cl>65536: continue
                r.select(0,cl=cl); t=B.time_graph(lambda i:r.select(i,cl=cl),12); o=B.time_graph(lambda i:r.select(i,True,cl=cl),12)
                nvrtc.load=patched(('-DTRACE',)); k=nvrtc.load(select._HERE/'select.cu','select_units',select._SELECT,(f"-DCLUSTER={cl}",f"-DHEADS={r.g}","-DMAXIMUM=0","-DUNIT=1","-DGROUP=32"),'90',180*1024); r.select(0,cl=cl); r.select(0,cl=cl); tr=trace(k)[0]; nvrtc.load=orig
                print(f'{name} select cluster {cl}: {t:.2f} overlapped {o:.2f} clocks {tr}',flush=True)
        r.select(0)
        if 'attend' in what:
            for W,S in ((4,2),(8,2),(4,4),(2,4),(8,1)):
                attend.WARPS,attend.STAGES=W,S
                for cl in (16,8,4,2):
                    if r.rows*cl>600 or W*S*8192>200000: continue
                    t=B.time_graph(lambda i:r.attend(i,cl=cl),max(12,r.sets)); print(f'{name} attend warps {W} stages {S} cluster {cl}: {t:.2f}',flush=True)
            attend.WARPS,attend.STAGES=4,2
            cl=attend.attend_cluster(r.rows); nvrtc.load=patched(('-DTRACE',)); k=nvrtc.load(attend._HERE/'attend.cu','attend_list',attend._TYPES,("-DD=128",f"-DGROUP_HEADS={r.g}",f"-DCLUSTER={cl}","-DUNIT=1","-DWARPS=4","-DSTAGES=2","-DBF16"),'90',65536); r.attend(0,cl=cl); r.attend(1,cl=cl); print(name,'attend clocks',cl,trace(k)[0]); nvrtc.load=orig
        if 'score' in what:
            nvrtc.load=patched(('-DTRACE',)); k=nvrtc.load(select._HERE/'fier.cu','fier_score',select._SCORE,("-DD=128",f"-DGROUP_HEADS={r.g}","-DPOOL=0","-DQ_BF16"),'90',8*8*6*128); r.score(0); r.score(1); print(name,'score clocks',trace(k)[0]); nvrtc.load=orig
        del r; torch.cuda.empty_cache()
main()
