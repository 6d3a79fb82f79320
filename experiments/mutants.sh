# every mutant must make the check fail; compiles with NVRTC, so that path is tried too
export TRTKV_KERNEL_CACHE=$PWD/mutcache; mkdir -p $TRTKV_KERNEL_CACHE; P=pkg/trtkv/plugins
try() { f=$1; shift; cp $P/$f /tmp/keep; sed -i "$1" $P/$f; cmp -s $P/$f /tmp/keep && echo "NOT MUTATED $1"; if timeout 100 python3 check_retrieval.py --small --seed 4 > /tmp/out 2>&1; then echo "SURVIVED $f $1"; else echo "killed $f $1: $(grep -m1 -E 'FAIL|Error' /tmp/out | cut -c1-90)"; fi; cp /tmp/keep $P/$f; }
timeout 100 python3 check_retrieval.py --small --seed 4 | tail -1
try kv_select/select.cu 's/a.x == cut_key \&\& a.y <= cut_index/a.x == cut_key \&\& a.y < cut_index/'
try kv_select/fier.cu 's/bit0 \* 0.0625f/bit0 * 0.07f/'
try kv_select/fier.cu 's/else sum0 +=/sum0 -=/; s/sum1 += (exp2_fast(t1\[0\])/sum1 += 1.05f * (exp2_fast(t1[0])/'
try kv_attend/attend.cu 's/const bool ok0 = ok >> gid/const bool ok0 = 1 | ok >> gid/'
try kv_attend/attend.cu 's/warp_top\[0\]\[h\], l = 0.f/warp_top[0][h], l = 0.001f/'
try kv_append/kernel.py 's/spread << (e \/\/ 2 + 16 \* (e % 2))/spread << (e \/\/ 2 + 16 * ((e + 1) % 2))/'
try kv_select/pages.cu 's/high = fmaxf(high, x1/high = fmaxf(high, x0/; s/down\[4 \* c + k\] = clip(w\[k\], false)/down[4 * c + k] = 0/'
try kv_select/select.cu 's/out\[i\] = last + i - first - wanted/out[i] = last + i - first - wanted + 1/'
