import sys, torch
sys.argv=['tune','none',sys.argv[1]]
exec(open('tune.py').read().replace('\nmain()\n','\n'))
from trtkv.plugins.kv_select import launch as select
r=Row(sys.argv[2])
for i in range(2):
    r.score(i); r.select(i); r.attend(i)
torch.cuda.synchronize()
