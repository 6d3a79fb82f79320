
import sys
names=sys.argv[1]; sys.argv=['tune','none',names]
exec(open('tune.py').read().replace('\nmain()\n','\n'))
for name in names.split(','):
    r=Row(name)
    for W,res,st in ((8,2,4),(4,4,4),(4,5,4),(4,6,4),(2,9,4),(2,8,4),(16,1,4),(8,2,8),(4,5,8)):
        r.plan_for(res*132)
        k=orig(select._HERE/'fier.cu','fier_score',select._SCORE,("-DD=128",f"-DGROUP_HEADS={r.g}","-DPOOL=0","-DQ_BF16",f"-DWARPS={W}",f"-DRESIDENT={res}",f"-DSTAGES={st}"),'90',W*st*6*128)
        def go(i):
            l=r.layers[i%r.sets]
            k.launch((r.parts.shape[1],r.hk,r.b),W*32,W*st*6*128,select.stream(),(r.q.data_ptr(),l.bits.data_ptr(),l.meta.data_ptr(),l.table.data_ptr(),r.lens.data_ptr(),r.scores.data_ptr(),r.parts.data_ptr(),r.q.stride(0),l.table.stride(0),1,r.scores.shape[2],r.budget,0.1275))
        go(0); print(name,'warps',W,'resident',res,'stages',st,'parts',r.plan.parts,f'{B.time_graph(go,max(6,r.sets)):.2f}',flush=True)
