import sys
names=sys.argv[1]; sys.argv=['tune','none',names]
exec(open('tune.py').read().replace('\nmain()\n','\n'))
import time
for name in names.split(','):
    r=Row(name)
    types=select._SCORE
    for ident in (0,1):
        if ident:
            for l in r.layers: l.table=torch.arange(l.table.numel(),device=DEV,dtype=torch.int32).view_as(l.table)%64
        for res in (2,):
            from cuda.bindings import driver
            k=orig(Path('fier_x.cu').resolve(),'fier_score',types,('-DD=128',f'-DGROUP_HEADS={r.g}','-DPOOL=0','-DQ_BF16',f'-DRESIDENT={res}'),'90',8*4*6*128); print('blocks per SM',driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(k._function,256,8*4*6*128))
            r.plan_for(res*132)
            for flags in ((),('NORMAL',),('HALF_MMA',),('NO_FETCH',),('NO_FETCH','NO_LOW'),('NO_FETCH','NO_LOW','NO_STORE'),('NO_FETCH','NO_LOW','NO_STORE','CHEAP'),('NO_FETCH','NO_LOW','NO_STORE','CHEAP','HALF_MMA'),('NO_FETCH','NO_LOW','NO_STORE','CHEAP','NORMAL')):
                pass
                k=orig(Path('fier_x.cu').resolve(),'fier_score',types,("-DD=128",f"-DGROUP_HEADS={r.g}","-DPOOL=0","-DQ_BF16",f"-DRESIDENT={res}",*(f'-D{f}' for f in flags)),'90',8*4*6*128)
                def go(i):
                    l=r.layers[i%r.sets]
                    k.launch((r.parts.shape[1],r.hk,r.b),256,8*4*6*128,select.stream(),(r.q.data_ptr(),l.bits.data_ptr(),l.meta.data_ptr(),l.table.data_ptr(),r.lens.data_ptr(),r.scores.data_ptr(),r.parts.data_ptr(),r.q.stride(0),l.table.stride(0),1,r.scores.shape[2],r.budget,0.1275))
                go(0); print(name,'identity' if ident else 'permuted','resident',res,flags,f'{B.time_graph(go,max(6,r.sets)):.2f}',flush=True)
