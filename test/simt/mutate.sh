#!/bin/bash
# Breaks kernels in one place at a time and shows which build's tests notice. By hand: make simt-mutate
# (a scratch copy of the tree). Arguments choose mutants by number. A survivor is a missing test, or is explained in
# README.md.
set -eu
cd "$(dirname "$0")/../.."

# file | what | sed expression, which must change exactly one line
mutants=(
  # barriers
  "layers/core/cuda_util.cuh|no barrier before of_warp is read|/T block_sum(/,/^}/{/if (lane == 0) of_warp/{n;s/__syncthreads();//}}"
  "layers/core/cuda_util.cuh|no barrier after of_warp is read|/T block_sum(/,/^}/s/__syncthreads();  \/\/ of_warp.*//"
  "layers/rmsnorm_row.cuh|no barrier before the teams' sums|/void add_teams(/{n;s/__syncthreads();//}"
  "layers/rmsnorm.cu|no barrier before the last 8 sums|/sums\[threadIdx.y\]\[threadIdx.x\] = sum;/{n;s/__syncthreads();//}"
  # guards
  "layers/rmsnorm.cu|row guard off by one|s/if (row >= rows) return;/if (row > rows) return;/"
  "layers/rmsnorm.cu|column guard of the slots off by one|s/c >= C) return;/c > C) return;/"
  "layers/rmsnorm.cu|all eight rows of threads add to dw|s/if (threadIdx.y > 0 || c >= C)/if (c >= C)/"
  "layers/core/cuda_util.cuh|odd rows taken for packable|s/bool packable = C % kPackWidth<T> == 0;/bool packable = C >= kPackWidth<T>;/"
  "layers/core/cuda_util.cuh|alignment not asked|s/reinterpret_cast<uintptr_t>(p) % 16 == 0/p != nullptr/"
  "layers/core/cuda_util.cuh|sums of absent warps|s/lane < kWarps ? of_warp\[lane\] : T(0)/of_warp[lane % kWarps]/"
  "layers/core/cuda_util.cuh|every lane writes the warp's sum|/T block_sum(/,/^}/s/if (lane == 0) of_warp/if (lane <= 1) of_warp/"
  # indices
  "layers/rmsnorm.cu|every team starts at the same row|s/rows \/ gridDim.x + team; row/rows \/ gridDim.x + 0 * team; row/"
  "layers/rmsnorm.cu|last row of a block dropped|s/int64_t end = (int64_t{blockIdx.x} + 1) \* rows \/ gridDim.x;/int64_t end = (int64_t{blockIdx.x} + 1) * rows \/ gridDim.x - 1;/"
  "layers/rmsnorm.cu|slots not zeroed|s/sums\[i \* kThreads\] = 0;/;/"
  "layers/rmsnorm.cu|slots of the next thread|s/+ threadIdx.x;$/+ (threadIdx.x + 1) % kThreads;/"
  "layers/rmsnorm_row.cuh|last team not added|s/t < kThreads \/ kTeam; t++/t < kThreads \/ kTeam - (kThreads > kTeam); t++/"
  "layers/rmsnorm.cu|a partial of every second group|s/p < num_partials; p += kSumRows/p < num_partials; p += 2 * kSumRows/"
  "layers/rmsnorm.cu|last of the 8 sums not added|s/r < kSumRows; r++/r < kSumRows - 1; r++/"
  "layers/rmsnorm.cu|width and team swapped in the slot's column|s/(i \/ slots.width \* slots.team + lane) \* slots.width/(i \/ slots.width * slots.width + lane) * slots.team/"
  # arithmetic
  "layers/rmsnorm.cu|dw overwritten|s/  dw\[c\] += sum;/  dw[c] = sum;/"
  "layers/rmsnorm_row.cuh|sign of the mean term|s/to_float(wp.element\[k\]))) - xk \* scale/to_float(wp.element[k]))) + xk * scale/"
  "layers/rmsnorm_row.cuh|s squared for s cubed|s/gx \* s \* s \* s/gx * s * s/"
  "layers/rmsnorm_row.cuh|eps forgotten|s/static_cast<float>(C) + eps)/static_cast<float>(C))/"
  "layers/rmsnorm_row.cuh|Plain rounds once|s/from_float<T>(wk \* to_float(from_float<T>(xhat)))/from_float<T>(wk * xhat)/"
  "layers/rmsnorm_row.cuh|LateCast rounds twice|s/: from_float<T>((one_plus + wk) \* xhat)/: from_float<T>((one_plus + wk) * to_float(from_float<T>(xhat)))/"
  "layers/rmsnorm_row.cuh|OnePlus forgotten in the sum|s/\* (one_plus + to_float(wp.element\[k\])) \* to_float(xp/* to_float(wp.element[k]) * to_float(xp/"
  "layers/rmsnorm_row.cuh|dw without s|s/\*sums += dyk\[k\] \* xk \* s;/*sums += dyk[k] * xk;/"
  "layers/rmsnorm_row.cuh|the mean stays in xhat|s/float xhat = (kCentres ? to_float(xp.element\[k\]) - centre/float xhat = (kCentres ? to_float(xp.element[k])/"
  "layers/rmsnorm_row.cuh|the mean stays in the variance|s/float xk = to_float(xp.element\[k\]) - centre;/float xk = to_float(xp.element[k]);/"
  "layers/rmsnorm_row.cuh|the mean of g is not taken off|s/if constexpr (kCentres) gradient -= shift;//"
  "layers/rmsnorm_row.cuh|the sum of g x stays about the first element|s/gx -= mean \* g;//"
  "layers/rmsnorm_row.cuh|the mean counts from zero|s/centre = origin + mean, /centre = mean, /"
  "layers/rmsnorm_row.cuh|the mean stays in dw|s/float xk = kCentres ? to_float(xp.element\[k\]) - centre/float xk = kCentres ? to_float(xp.element[k])/"
  # the gate
  "layers/gated_act.cu|column guard of the forward off by one|/gated_act_forward_kernel(T/,/^}/s/at.f >= F/at.f > F/"
  "layers/gated_act.cu|column guard of the backward off by one|/gated_act_backward_kernel(T/,/^}/s/at.f >= F/at.f > F/"
  "layers/gated_act.cu|column guard of a weighted row off by one|s/f < F; f += kRowThreads/f <= F; f += kRowThreads/"
  "layers/gated_act.cu|packs of a row beyond 128 left|s/f < F; f += kRowThreads \* kWidth/f < F; f += F/"
  "layers/gated_act.cu|up taken for gate|s/Columns{f, F + f}/Columns{f, f}/"
  "layers/gated_act.cu|by turns, but not in packs|s/Columns{2 \* f, 2 \* f + kWidth}/Columns{2 * f, 2 * f + 1}/"
  "layers/gated_act.cu|gate and up change their turns|s/packs\[(2 \* k + 1) \/ kWidth\]\[(2 \* k + 1) % kWidth\]/packs[2 * k \/ kWidth][2 * k % kWidth]/"
  "layers/gated_act.cu|no derivative on the limit|s/gate_moves = z <= clamp.limit/gate_moves = z < clamp.limit/"
  "layers/gated_act.cu|one more than up forgotten|s/ : up) + 1.0f;/ : up);/"
  "layers/gated_act.cu|alpha forgotten in the slope|s/slope = clamp.alpha;/slope = 1;/"
  "layers/gated_act.cu|the forward without the row's weight|s/out\[k\] = weight \* gated/out[k] = gated/"
  "layers/gated_act.cu|the gradient of up without the row's weight|s/up(in, k) = weight \* dyk/up(in, k) = dyk/"
  "layers/gated_act.cu|gradient of the weight weighted|s/d_weight += dyk\[k\] \* g.y;/d_weight += weight * dyk[k] * g.y;/"
  "layers/gated_act.cu|every block takes the first part of a row|s/f((int64_t{blockIdx.x % blocks_per_row} \* blockDim.x/f((int64_t{0 * blocks_per_row} * blockDim.x/"
  "layers/gated_act.cu|d_gate and d_up swapped|s/store_floats(d_gate_up + at.first, in\[0\]);/store_floats(d_gate_up + at.first, in[1]);/"
  "layers/gated_act.cu|slope forgotten|s/act \* (1.0f - s) \* slope)/act * (1.0f - s))/"
  "layers/gated_act.cu|sign of the exponent|s/sigmoid(a)/sigmoid(-a)/"
  # RoPE
  "layers/rope.cu|guard of the table off by one|s/if (i >= num_tokens \* half)/if (i > num_tokens * half)/"
  "layers/rope.cu|the backward turns like the forward|s/sk = sign \* s.value\[k\]/sk = s.value[k]/"
  "layers/rope.cu|one head too many|s/h = threadIdx.y; h < num_heads/h = threadIdx.y; h <= num_heads/"
  "layers/rope.cu|second half one off|s/m + half);/m + half - 1);/"
  "layers/rope.cu|tails of the tables taken for packs|s/ \&\& half % kPackWidth<T> == 0;/;/"
  "layers/rope.cu|pairs beyond the first group left|s/m += blockDim.x \* kWidth/m += half/"
  # the norm of q and k
  "layers/qk_norm.cu|k weighed as q (forward)|/qk_norm_forward_kernel(T/,/^}/s/is_k ? k_weight : q_weight/is_k ? q_weight : q_weight/"
  "layers/qk_norm.cu|dw of k added to that of q|s/is_k ? sums + q_slots_per_lane \* kThreads : sums/is_k ? sums : sums/"
  "layers/qk_norm.cu|only the first norms of a token|/qk_norm_forward_kernel(T/,/^}/s/i += kThreads \/ kTeam/i += 1 << 20/"
  "layers/qk_norm.cu|every block starts at token 0|s/int64_t t = blockIdx.x \* num_tokens \/ gridDim.x/int64_t t = 0/"
  "layers/qk_norm.cu|slots not zeroed|s/sums\[i \* kThreads\] = 0;/;/"
  "layers/qk_norm.cu|v copied one pack short|s/c < shape.v_width();/c < shape.v_width() - kWidth;/"
  "layers/qk_norm.cu|the partner's sine has one sign|s/turn = is_first ? -sign : sign;/turn = sign;/"
  "layers/qk_norm.cu|the backward turns like the forward|s/turn = is_first ? -sign : sign;/turn = is_first ? -1.0f : 1.0f;/"
  "layers/qk_norm.cu|interleaved: the second turns like the first|s/x1 \* ck\[k\] + sign \* x0/x1 * ck[k] - sign * x0/"
  "layers/qk_norm.cu|interleaved: the backward turns like the forward|s/x0 \* ck\[k\] - sign \* x1/x0 * ck[k] - x1/"
  "layers/qk_norm.cu|every pair by the first angle|s/load_floats(ck, cos + m)/load_floats(ck, cos)/"
  "layers/qk_norm.cu|one dimension too many rotates|s/if (d >= 2 \* half) return;/if (d > 2 * half) return;/"
  "layers/qk_norm.cu|alignment of the tables not asked|s/{rotation.cos.data, rotation.sin.data}/{}/"
  "layers/qk_norm.cu|tails of the tables taken for packs|s/is_packable<T>(rotation.half(), /is_packable<T>(0, /"
  "layers/qk_norm.cu|angles of the first token|s/return {cos + t \* half, sin + t \* half, half/return {cos, sin, half/"
  # Ulysses
  "layers/ulysses.cu|last sharer not added|s/i < sharers; i++/i < sharers - 1; i++/"
  "layers/ulysses.cu|every sharer writes|s/width = is_first ? part_width : q_width/width = part_width/"
  "layers/ulysses.cu|k taken for v|s/: c < runs.v.part_head \* s.head_dim ? runs.k/: c <= runs.v.part_head * s.head_dim ? runs.k/"
  "layers/ulysses.cu|parts and tokens swapped in a copy|s/to += (b \* num_a + a) \* width/to += (a * num_b + b) * width/"
  # sums, AdamW, the embedding
  "layers/reduce.cu|sum of squares overwritten|s/\*sum += added;/*sum = added;/"
  "layers/reduce.cu|partial sums beyond 256 dropped|s/for (int p = threadIdx.x; p < num_partials; p += kThreads)/if (const int p = threadIdx.x; p < num_partials)/"
  "layers/adamw.cu|guard off by one|s/if (i >= n) return;/if (i > n) return;/"
  "layers/adamw.cu|alignment of the weights not asked|s/g.data, weights.data})/g.data})/"
  "layers/embedding.cu|a run that reaches in is taken for a new one|s/if (begin > 0) {/if (begin > num_tokens) {/"
  "layers/embedding.cu|runs of up to 32 chunks only|s/while (ended == 0) {/for (int once = 0; once < 1; once++) {/"
  "layers/embedding.cu|no barrier before the eight sums|/sums\[group\]\[k\]\[lane\] = sum\[k\];/{n;s/__syncthreads();//}"
  "layers/embedding.cu|no barrier after the eight sums|s/__syncthreads();  \/\/ sums is free.*//"
  # a residual add in the pass of a norm
  "layers/rmsnorm_row.cuh|the sum is not written|s/store_pack<kWidth>(sum_row + c, xp);/;/"
  "layers/rmsnorm_row.cuh|the norm of x, not of the sum|s/if constexpr (kAdds) x = sum_row;/;/"
  "layers/rmsnorm_row.cuh|no residual in the backward|s/residual ? to_float(rp.element\[k\]) + gradient : gradient/gradient/"
  # sums of parts, AdamW
  "layers/reduce.cu|the last part left out|/ add_parts_kernel(/,/^}/s/for (int p = 1; p < num_parts; p++)/for (int p = 1; p < num_parts - 1; p++)/"
  "layers/reduce.cu|fp64: the last part left out|/ add_double_parts_kernel(/,/^}/s/for (int p = 1; p < num_parts; p++)/for (int p = 1; p < num_parts - 1; p++)/"
  "layers/reduce.cu|fp64: sum overwritten|s/sum\[i\] += added;/sum[i] = added;/"
  "layers/adamw.cu|no clipping|s/c.clip_scale \* gi\[k\]/gi[k]/"
  # linear
  "layers/linear.cu|weight gradient overwritten|s/blas_gemm(device, dw, {dy, true}, {x}, true)/blas_gemm(device, dw, {dy, true}, {x}, false)/"
  "layers/linear.cu|alignment of b not asked|s/{y.data, b.data})/{y.data})/"
  "layers/linear.cu|a bias of bf16 for sums of fp32|s/ \&\& b.dtype == y.dtype \&\& / \&\& /"
  # sums of columns
  "layers/column_sums.cu|the first row of a range by every warp|s/range \* count \/ ranges + warp; r/range * count \/ ranges; r/"
  "layers/column_sums.cu|no barrier before the warps' sums|/kWarpSize + lane\] = sum\[k\];/{n;s/__syncthreads();//}"
  "layers/column_sums.cu|guard of the columns off by one|s/if (column >= N) continue;/if (column > N) continue;/"
  "layers/column_sums.cu|sums of one range overwritten|s/to = kAdds ? to + total : total;/to = total;/"
  "layers/column_sums.cu|sums of ranges overwritten|s/  sums\[i\] += sum;/  sums[i] = sum;/"
  "layers/column_sums.cu|the last warp's sums left out|s/for (int w = 0; w < kWarps; w++) total/for (int w = 0; w < kWarps - 1; w++) total/"
  "layers/column_sums.cu|column guard off by one|s/if (n < N) {/if (n <= N) {/"
  "layers/column_sums.cu|guard of the elements off by one|s/if (i >= n) return;/if (i > n) return;/"
  "layers/column_sums.cu|every second row|s/r < end; r += kWarps)/r < end; r += 2 * kWarps)/"
  "layers/column_sums.cu|last rows dropped|s/(range + 1) \* count \/ ranges;/(range + 1) * (count \/ ranges);/"
  "layers/column_sums.cu|columns not put back in order|s/i % kWarpSize \* kWidth + i \/ kWarpSize;/i;/"
  # routing
  "layers/moe.cu|-0 is below 0|s/x == x ? x + 0.0f : kInfinity/x == x ? x : kInfinity/"
  "layers/moe.cu|what is not a number comes last|s/x + 0.0f : kInfinity/x + 0.0f : -kInfinity/"
  "layers/moe.cu|who was chosen may be chosen again|s/== expert ? 0 : key\[i\]/== expert ? key[i] : key[i]/"
  "layers/moe.cu|one group too many|s/num_better >= router.top_groups/num_better > router.top_groups/"
  "layers/moe.cu|a group is better than itself|s/ \&\& g < group)/ \&\& g <= group)/"
  "layers/moe.cu|a group is its best expert|s/sort_key(best + second)/sort_key(best)/"
  "layers/moe.cu|groups are scored before the scores are there|/if (e < E) shared\[e\] =/{n;n;s/__syncwarp();//}"
  "layers/moe.cu|groups are compared before they are scored|/sort_key(best + second)/{n;n;s/__syncwarp();//}"
  "layers/moe.cu|never renormalised|s/router.renormalize ? sum + 1e-20f : 1.0f/1.0f/"
  "layers/moe.cu|no scale|s/weight = s \* (router.scale \/ /weight = s * (1.0f \/ /"
  "layers/moe.cu|every warp sorts the same slots|s/kSortWarps + warp_index()) \* of_warp;/kSortWarps + 0 * warp_index()) * of_warp;/"
  "layers/moe.cu|the sort is not stable|s/__popc(alike \& ((1u << lane) - 1))/__popc(alike >> lane) - 1/"
  "layers/moe.cu|next is written before all have read it|s/__syncwarp();  \/\/ next is read//"
  "layers/moe.cu|next is read before it is written|s/__syncwarp();  \/\/ next is written//"
  "layers/moe.cu|experts are compared by too few bits|s/static_cast<uint64_t>(E - 1)/static_cast<uint64_t>((E - 1) \/ 2)/"
  "layers/moe.cu|no barrier in the scan|/of_warp\[warp\] = sum;/{n;s/__syncthreads();//}"
  "layers/moe.cu|the last warp is not counted|s/for (int w = 0; w < kSortWarps; w++) sum/for (int w = 0; w < kSortWarps - 1; w++) sum/"
  "layers/moe.cu|every block writes the offsets|s/if (blockIdx.x == 0) offsets\[e\]/if (blockIdx.x <= 1) offsets[e]/"
  "layers/moe.cu|rows are given before the offsets are there|/if (blockIdx.x == 0 \&\& threadIdx.x == 0) offsets/{n;s/__syncthreads();//}"
  "layers/moe.cu|softmax backward without its sum|s/w \* (d_weight - warp_sum(w \* d_weight))/w * d_weight/"
  "layers/moe.cu|zeros are put after gradients|/of_chosen\[e\] = 0;/{n;s/__syncwarp();//}"
  "layers/moe.cu|sigmoid without its slope|s/ds \* s \* (1.0f - s)/ds * s/"
  "layers/moe.cu|pads are balanced|s/balance_slope \&\& is_token\[t\]/balance_slope/"
  "layers/moe.cu|pads are counted|s/if (!is_token\[t\]) continue;/;/"
  "layers/moe.cu|the last warp's probabilities left out|s/for (int w = 0; w < kWarps; w++) total/for (int w = 0; w < kWarps - 1; w++) total/"
  "layers/moe.cu|statistics overwritten|s/  to += sum;/  to = sum;/"
  "layers/moe.cu|the last layer is not balanced|s/l < layers; l++/l < layers - 1; l++/"
  "layers/moe.cu|the balance loss overwritten|s/\*loss += sum;/*loss = sum;/"
  "layers/moe.cu|every token of the statistics in the first block|s/t = blockIdx.x \* num_tokens \/ gridDim.x + warp;/t = warp;/"
  # rows
  "layers/moe_rows.cu|the last copy is not made|s/i < k; i++) store_pack/i < k - 1; i++) store_pack/"
  "layers/moe_rows.cu|a bias by the weight of another row|s/row_weights\[rows\[i\]\]/row_weights[t * k + i]/"
  "layers/moe_rows.cu|the gate is not squashed|s/sigmoid(to_float(terms.shared_gate\[t\]))/to_float(terms.shared_gate[t])/"
  "layers/moe_rows.cu|alignment of the addend not asked|s/terms.shared.data, terms.addend.data}/terms.shared.data}/"
  "layers/moe_rows.cu|d_row_weights overwritten|s/\]\] += d_weight;/]] = d_weight;/"
  "layers/moe_rows.cu|a token too many|s/if (t >= num_tokens) return;/if (t > num_tokens) return;/"
  "layers/moe_rows.cu|the gate without its slope|s/sum \* s \* (1.0f - s)/sum * s/"
  # products of groups
  "layers/grouped_linear.cu|a tile too late|s/first_tile(expert + place) <= i/first_tile(expert + place) < i/"
  "layers/grouped_linear.cu|rows of the next expert|s/std::min(begin + kM, end)}/begin + kM}/"
  "layers/grouped_linear.cu|experts of a step only|s/count = std::min(step, count - last);/count = 1;/"
  "layers/grouped_linear.cu|tiles are read before they are there|s/__syncthreads();  \/\/ this step.*//"
  "layers/grouped_linear.cu|a step is not waited for|s/cp_async_wait<kAhead - 1>/cp_async_wait<kAhead>/"
  "layers/grouped_linear.cu|the result over operands that others read|s/__syncthreads();  \/\/ the operands.*//"
  "layers/grouped_linear.cu|the result is read before it is there|/Engine::put(\&result/{n;s/__syncthreads();//}"
  "layers/grouped_linear.cu|the last step left out|s/(length + Engine::kK - 1) \/ Engine::kK/length \/ Engine::kK/"
  "layers/grouped_linear.cu|weights of the first expert|s/w + int64_t{tile.expert} \* N \* K/w + int64_t{0} * N * K/"
  "layers/grouped_linear.cu|bias of the first columns|s/N + first + column + i\]/N + column + i]/"
  "layers/grouped_linear.cu|dw overwritten|s/sum\[i\] += run\[i\]/sum[i] = run[i]/"
  "layers/grouped_linear.cu|guard of dw's rows off by one|s/p + row >= P/p + row > P/"
  "layers/grouped_linear.cu|guard of dw's columns off by one|s/q + column >= Q/q + column > Q/"
  "layers/grouped_linear.cu|a row too many for dw|s/num_rows = offsets\[expert + 1\] - begin;/num_rows = offsets[expert + 1] - begin + 1;/"
  "layers/grouped_linear.cu|alignment of dw not asked|s/{b.data, dw.data}/{b.data}/"
  "layers/grouped_linear.cu|fp32: A is not transposed|s/kATransposed ? ab\[i\]\[m\] : ab\[m\]\[i\]/ab[m][i]/"
  "layers/core/tile.cuh|first operand: transposed blocks swapped|s/k + lane \/ 16 \* 8 + lane % 8, m \/ 8 + lane \/ 8 % 2/k + lane \/ 8 % 2 * 8 + lane % 8, m \/ 8 + lane \/ 16/"
  # loss
  "layers/loss.cu|the running sum is not rescaled|s/sum \*= expf(max - grown);/;/"
  "layers/loss.cu|threads' sums are not brought to one maximum|s/block_sum<kRowThreads>(sum \* expf(max - row_max))/block_sum<kRowThreads>(sum)/"
  "layers/loss.cu|one-hot without the scale|s/v + k == target ? scale : 0.0f/v + k == target ? 1.0f : 0.0f/"
  "layers/loss.cu|slope of the cap forgotten|s/ - onehot) \* map.slope(z\[k\]))/ - onehot))/"
  "layers/loss.cu|logits are not scaled without a cap|s/tanhf(u \* scale \* inverse) : u \* scale/tanhf(u * scale * inverse) : u/"
  "layers/loss.cu|logits are not scaled below a cap|s/tanhf(u \* scale \* inverse)/tanhf(u * inverse)/"
  "layers/loss.cu|the gradient is not scaled with the logits|s/(grad_scale \* shape.logit_scale)/(grad_scale)/"
  "layers/loss.cu|nll overwritten|s/  \*nll += sum;/  *nll = sum;/"
  "layers/loss.cu|no barrier before the last sum|/loss_sum_kernel(/,/^}/s/__syncthreads();//"
  "layers/loss.cu|rows behind the targets are not zeroed|s/store_pack<kWidth>(du + i \* V + v, zero);/;/"
  "layers/loss.cu|target at the pack's start only|s/v + k == target/v == target/"
  "layers/loss.cu|target of another row|s/targets\[rows\[i\]\]/targets[i]/"
  "layers/loss.cu|a row too many is gathered|s/i < num_rows ? from/i <= num_rows ? from/"
  "layers/loss.cu|dx not put back in its place|s/T\* row = to + rows\[i\] \* C;/T* row = to + (0 * rows[i] + i) * C;/"
  "layers/loss.cu|rows beyond 256 dropped|s/i < n; i += kSumThreads) sum/i < n; i += n) sum/"
  # attention
  "layers/attention.cu|forward: the next tile is read before it is there|/attention_forward_kernel(/,/^}/s/__syncthreads();  \/\/ this stage.*//"
  "layers/attention.cu|forward: q is overwritten while others read it|/attention_forward_kernel(/,/^}/s/__syncthreads();  \/\/ q is read no more//"
  "layers/attention.cu|forward: a query sees the next token|s/j > tile.begin + Engine::row(r))) s/j > tile.begin + Engine::row(r) + 1)) s/"
  "layers/attention.cu|forward: sums are not rescaled|s/      sum\[r\] \*= decay\[r\];/      ;/"
  "layers/attention.cu|forward: the output is not rescaled|s/out\[n\]\[e\] \*= decay\[Engine::row_slot(e)\]/out[n][e] *= 1/"
  "layers/attention.cu|forward: lse in base 2|s/max\[r\] \* kLn2 + logf(total)/max[r] + logf(total)/"
  "layers/attention.cu|forward: rows beyond the end are written|s/if (query < p.num_tokens \&\& threadIdx.x % Engine::kRowLanes == 0)/if (threadIdx.x % Engine::kRowLanes == 0)/"
  "layers/attention.cu|keys: the next tile is read before it is there|/attention_backward_keys_kernel(/,/^}/s/__syncthreads();  \/\/ this stage.*//"
  "layers/attention.cu|keys: k is overwritten while others read it|s/__syncthreads();  \/\/ k and v are read no more//"
  "layers/attention.cu|keys: queries of the next document|s/query + c >= end_query\[r\])/query + c > end_query[r])/"
  "layers/attention.cu|keys: D forgotten|s/(ds\[n\]\[e\] - column_D(stage)\[c\]) \* logit.slope/ds[n][e] * logit.slope/"
  "layers/attention.cu|keys: the last tile left out|s/for (int i = 0; i < num_tiles; i++) {/for (int i = 0; i < num_tiles - 1; i++) {/"
  "layers/attention.cu|dq: a query does not see itself|/attention_backward_queries_kernel(/,/^}/s/j > tile.begin + Engine::row(r)/j >= tile.begin + Engine::row(r)/"
  "layers/attention.cu|window one longer for queries|s/query - window + 1)/query - window)/"
  "layers/attention.cu|no window for keys|s/std::min(bounds\[2 \* int64_t{key} + 1\] - key, window)/bounds[2 * int64_t{key} + 1] - key/"
  "layers/attention.cu|documents not masked off the diagonal|s/ || key < last_first_key;/;/"
  "layers/attention.cu|slope of the cap forgotten|s/kLog2e, 1 - t \* t};/kLog2e, 1};/"
  "layers/attention.cu|weights over 1|s/exp2f(fminf(logit - lse, 0.0f))/exp2f(logit - lse)/"
  "layers/attention.cu|D by token|s/D\[row % NH \* num_tokens + row \/ NH\] = sum/D[row] = sum/"
  "layers/attention.cu|lse of a query that is none|s/\[c\] = query < p.num_tokens ? lse/[c] = query <= p.num_tokens ? lse/"
  "layers/attention.cu|every lane starts with the sink|s/sinks \&\& threadIdx.x % Engine::kRowLanes == 0 ? 1/sinks ? 1/"
  "layers/attention.cu|the sink in base e|s/to_float(sinks\[tile.head\]) \* kLog2e/to_float(sinks[tile.head])/"
  "layers/attention.cu|the sink of another head|s/to_float(sinks\[tile.head\])/to_float(sinks[tile.head \/ 2])/"
  "layers/attention.cu|d_sinks overwritten|s/d_sinks\[blockIdx.x\] -= sum/d_sinks[blockIdx.x] = -sum/"
  "layers/attention.cu|tails of lse taken for packs|s/is_packable<float>(p.num_tokens, {lse/is_packable<float>(0, {lse/"
  "layers/core/tile.cuh|a row too many is read|s/count = from < rows.num_rows/count = from <= rows.num_rows/"
  "layers/core/tile.cuh|a row too many is written|s/count = to < rows.num_rows/count = to <= rows.num_rows/"
  "layers/core/tile.cuh|no zeros beyond the width|s/k < count ? data\[k\] : T{}/data[k]/"
  "layers/attention_tile.cuh|no __syncwarp before scores are read|/of_row\[column(n, 0)\] = scores/{n;s/__syncwarp();//}"
  "layers/attention_tile.cuh|no __syncwarp after scores are read|s/__syncwarp();  \/\/ scratch is free.*//"
  "layers/attention_tile.cuh|maximum of half a row's lanes|/float row_max(/,/^}/s/kRowLanes \/ 2/kRowLanes \/ 4/"
  "layers/attention_tile.cuh|sum of half a row's lanes|/float row_sum(/,/^}/s/kRowLanes \/ 2/kRowLanes \/ 4/"
  "layers/attention_tile.cuh|both warps make the first columns|s/return warp_index() \/ kRowWarps \* kSumWidth;/return 0;/"
  "layers/attention_tile.cuh|two weights swapped|s/pack_bf16(left\[2\], left\[3\])/pack_bf16(left[3], left[2])/"
  # cuDNN: what is told to it
  "layers/attention_ragged.cu|length of the next document|s/cu_seqlens\[i + 1\] - token/cu_seqlens[i + 1] - token + 1/"
  "layers/attention_ragged.cu|offsets of dk as of q|s/offsets_kv\[i\] = token \* sizes.kv;/offsets_kv[i] = token * sizes.q;/"
  "layers/attention_cudnn.cu|v begins where k does|s/{kV, q + (key.num_heads + key.num_kv_heads) \* head_bytes}/{kV, q + key.num_heads * head_bytes}/"
  "layers/attention_cudnn.cu|window one longer|s/left_bound(static_cast<int>(key_.window))/left_bound(static_cast<int>(key_.window + 1))/"
  "layers/attention_cudnn.cu|no scale|s/set_attn_scale(static_cast<float>(key_.scale))/set_attn_scale(1.0f)/"
  "layers/attention_cudnn.cu|rows of q as of o|s/q_ = input(kQ, \"q\", key.num_heads, key.qkv_heads(), offsets_qkv_)/q_ = input(kQ, \"q\", key.num_heads, key.num_heads, offsets_qkv_)/"
  "layers/attention_cudnn.cu|do at the offsets of qkv|s/d_o = input(kDO, \"do\", key_.num_heads, key_.num_heads, offsets_q_)/d_o = input(kDO, \"do\", key_.num_heads, key_.num_heads, offsets_qkv_)/"
  "layers/attention_cudnn.cu|dk and dv swapped|s/pointers\[kDK\] = parts.dk.data/pointers[kDK] = parts.dv.data/"
  "layers/attention_cudnn.cu|lse by head|s/stride({key_.slot_length \* key_.num_heads, 1, key_.num_heads, 1})/stride({key_.slot_length * key_.num_heads, key_.slot_length, 1, 1})/"
  "layers/attention_cudnn.cu|plans do not know the window|s/window(s.window < b.slot_length ? s.window : 0),/window(0),/"
  "layers/attention_cudnn.cu|a slot too short|s/std::max(kMinSlotLength, power_of_two(longest)),/std::max(kMinSlotLength, power_of_two(longest) \/ 2),/"
  "layers/attention_cudnn.cu|scratch over dv|s/    scratch = base ? static_cast<char\*>(base) + at : nullptr;/    scratch = base ? static_cast<char*>(base) + at - 512 : nullptr;/"
  "layers/attention_cudnn.cu|gradients are not joined|s/  join_qkv_cuda(device, dqkv, parts.dq, parts.dk, parts.dv);/  ;/"
  "layers/attention_ragged.cu|guard of the slots off by one|s/if (i > num_slots) return;/if (i > num_slots + 1) return;/"
  "layers/attention_ragged.cu|slots beyond the last document|s/i < num_documents ? i : num_documents\]/i]/"
  "layers/attention_ragged.cu|empty slots have a token|s/- token) : 0;/- token) : 1;/"
  "layers/attention_ragged.cu|offsets of 32 bits|s/= token \* sizes.qkv;/= static_cast<int32_t>(token * sizes.qkv);/"
  "layers/attention_ragged.cu|guard of the join off by one|s/if (at >= T \* row) return;/if (at > T * row) return;/"
  "layers/attention_ragged.cu|dv from the wrong column|s/(c - q_row - kv_row)/(c - q_row)/"
  "layers/attention_ragged.cu|alignment of dq, dk, dv not asked|s/{dqkv.data, dq.data, dk.data, dv.data}/{dqkv.data}/"
  "layers/attention_cudnn.cu|k in rows of q|s/input(kK, \"k\", key.num_kv_heads, key.qkv_heads()/input(kK, \"k\", key.num_kv_heads, key.num_heads/"
  "layers/attention_cudnn.cu|a query sees the next token|s/set_diagonal_band_right_bound(0)/set_diagonal_band_right_bound(1)/"
  "layers/attention_cudnn.cu|offsets of lse are those of o|/kOffsetsLse, documents/s/offsets_lse.data/offsets_q.data/"
  "layers/attention_cudnn.cu|offsets of dk are those of dq|s/output(dk, kDK, key_.num_kv_heads, offsets_kv)/output(dk, kDK, key_.num_kv_heads, offsets_q_)/"
  "layers/attention_cudnn.cu|no stream|/cudnnSetStream/d"
  "layers/attention_cudnn.cu|no room to align the workspace|s/ + kAlignment;  \/\/ the caller/;  \/\/ the caller/"
  "layers/attention_cudnn.cu|plans for every number of tokens|s/round_up(T, std::max(kTokenMultiple, power_of_two(T) \/ (2 \* kTokenSteps)))}/T}/"
  "layers/attention_cudnn.cu|never in a fixed order|s/algorithm(key_.sm \/ 10 == 10)/algorithm(false)/"
  "layers/attention_cudnn.cu|always in a fixed order|s/algorithm(key_.sm \/ 10 == 10)/algorithm(true)/"
  "layers/attention_cudnn.cu|slots of one token|s/kMinSlotLength = 128;/kMinSlotLength = 1;/"
  "layers/attention_cudnn.cu|a refused plan is used|s/  if (!found->second.forward) return {};/  ;/"
  "layers/attention_cudnn.cu|plans with as much scratch are one|s/<=>(const PlanKey\&) const = default;/<=>(const PlanKey\& o) const { return scratch_bytes() <=> o.scratch_bytes(); }/"
  "layers/attention_cudnn.cu|plans for every length|s/std::max(kMinSlotLength, power_of_two(longest))/std::max(kMinSlotLength, longest)/"
  # latent attention
  "layers/mla.cu|q is not turned|s/head \* w.head_dim + (c < w.rope ? w.nope + c : c - w.rope)/head * w.head_dim + c/"
  "layers/mla.cu|dq is not turned back|s/head \* w.head_dim + (c < w.nope ? w.rope + c : c - w.nope)/head * w.head_dim + c/"
  "layers/mla.cu|k_rope of the first token|s/k_rope + t \* w.rope \* kWidth/k_rope + 0 * t * w.rope * kWidth/"
  "layers/mla.cu|v is not padded|s/} else if (c < w.v) {/} else {/"
  "layers/mla.cu|v taken from k|s/head \* kv_width + w.nope + c)/head * kv_width + c)/"
  "layers/mla.cu|the last head not added|s/head < w.heads; head++/head < w.heads - 1; head++/"
  "layers/mla.cu|packs beyond the first of a thread left|/mla_assemble_kernel(T/,/^}/s/i < 3 \* row; i += blockDim.x/i < 3 * row; i += 3 * row/"
  "layers/mla.cu|guard of the resize off by one|s/if (i >= num_packs) return;/if (i > num_packs) return;/"
  "layers/mla.cu|no zeros beyond the width|s/if (c < from_width) pack/if (c <= from_width) pack/"
  "layers/mla.cu|tails of v taken for packs|s/ \&\& is_packable<T>(s.v, {});/;/"
  "layers/mla.cu|tails of the rotated part taken for packs|s/is_packable<T>(s.rope, {}) \&\& //"
  "layers/mla.cu|alignment of kv not asked|s/{qkv.data, q.data, kv.data, k_rope.data}/{qkv.data, q.data, k_rope.data}/"
  "layers/mla.cu|alignment of dk_rope not asked|s/{dq.data, dkv.data, dk_rope.data, dqkv.data}/{dq.data, dkv.data, dqkv.data}/"
  # without kernels: what cuBLASLt is told; streams
  "layers/core/blas.cu|every product adds|s/beta = accumulate ? 1 : 0;/beta = 1;/"
  "layers/core/blas.cu|the bias of the first call|s/if (bias) set(plan.operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias.data);/;/"
  "layers/core/blas.cu|the transposition of the other operand|s/CUBLASLT_MATMUL_DESC_TRANSA, p.b_transposed/CUBLASLT_MATMUL_DESC_TRANSA, p.a_transposed/"
  "layers/core/blas.cu|parts of a sum rounded to bf16|/CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK/d"
  "layers/core/blas.cu|the alignment of the other operand|s/MIN_ALIGNMENT_A_BYTES, p.b_alignment/MIN_ALIGNMENT_A_BYTES, p.a_alignment/"
  "layers/core/blas.cu|any alignment of the result|s/alignment_of(d.data),/256,/"
  "layers/core/blas.cu|any alignment of the bias|s/alignment_of(bias.data)}/256}/"
  "layers/core/blas.cu|plans know sizes only|s/  auto operator<=>(const Problem\&) const = default;/  auto operator<=>(const Problem\& o) const { return std::tie(M, N, K, in) <=> std::tie(o.M, o.N, o.K, o.in); }/"
  "layers/core/blas.cu|a product of nothing is left undefined|s/if (!accumulate) device.fill_zero(d.data, d.size_bytes());/;/"
  "layers/core/device.cu|a half is written while copies read it|/cudaEventSynchronize(is_free_/d"
  "layers/core/device.cu|the source of an upload stands still|s/from += part, size_bytes/size_bytes/"
  "layers/core/device.cu|copies to the host are not waited for|/^void cuda_copy(/,/^}/{/cudaStreamSynchronize/d}"
  "layers/core/host_buffer.cu|a copy does not wait for the computation|/cudaStreamWaitEvent(c.stream/d"
  "layers/core/host_buffer.cu|the computation does not wait for a copy|/cudaStreamWaitEvent(c.compute/d"
  "layers/core/host_buffer.cu|done before the copy is|s/cudaEventRecord(c.is_done\[static_cast<size_t>(slot)\], c.stream)/cudaEventRecord(c.is_done[static_cast<size_t>(slot)], c.compute)/"
  "layers/core/host_buffer.cu|every slot is the first|s/c.compute, c.is_done\[static_cast<size_t>(slot)\]/c.compute, c.is_done[0]/"
)

# The tests of the kernels, cheapest build first; BUILDS=plain for a first look.
builds=${BUILDS:-plain check asan}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
git ls-files -z | xargs -0 cp -p --parents -t "$scratch"
mkdir -p "$scratch/build"
[ -d build/simt ] && cp -a build/simt "$scratch/build/"

# BUILD FILE: the test of that file; of what kernels share, RMSNorm's.
program() {
  case "$2" in
    layers/column_sums.cu) echo "build/simt/$1/linear_simt_test" ;;
    layers/moe_rows.cu) echo "build/simt/$1/moe_simt_test" ;;
    layers/core/tile.cuh) echo "build/simt/$1/grouped_linear_simt_test" ;;
    layers/attention_cudnn.cu | layers/attention_tile.cuh) echo "build/simt/$1/attention_simt_test" ;;
    layers/core/blas.cu) echo "build/simt/$1/linear_simt_test" ;;
    layers/core/device.cu | layers/core/host_buffer.cu) echo "build/simt/$1/device_simt_test" ;;
    layers/core/* | *.cuh) echo "build/simt/$1/rmsnorm_simt_test" ;;
    *) echo "build/simt/$1/$(basename "$2" .cu)_simt_test" ;;
  esac
}
# A mutant may leave a name unused.
compile() { make -s -C "$scratch" WARN=-w "$(program "$1" "$2")" > "$scratch/log" 2>&1; }
passes() { (cd "$scratch" && timeout 600 "$(program "$1" "$2")" --gtest_brief=1 --gtest_fail_fast > "$scratch/log" 2>&1); }

chosen=$([ $# -gt 0 ] && echo "$@" || echo "${!mutants[@]}")
for file in $(for i in $chosen; do echo "${mutants[$i]%%|*}"; done | sort -u); do
  for build in $builds; do
    if ! { compile "$build" "$file" && passes "$build" "$file"; }; then
      tail -20 "$scratch/log"
      echo "the tests fail without a mutation"
      exit 1
    fi
  done
done

survivors=0
for i in $chosen; do
  IFS='|' read -r file what expression <<< "${mutants[$i]}"
  sed "$expression" "$file" > "$scratch/$file"
  changed=$(diff "$file" "$scratch/$file" | grep -c '^<' || true)
  [ "$changed" = 1 ] || { echo "mutant $i changes $changed lines of $file: $what"; exit 1; }
  verdict="SURVIVES"
  for build in $builds; do
    compile "$build" "$file" || { verdict="does not compile: $(grep -m1 error "$scratch/log")"; break; }
    passes "$build" "$file" && continue
    why=$(grep -m1 -oE "race \([a-z ]+\)|out-of-bounds [a-z]+|uninitialised|invalid access|divergent|misaligned|\
runtime error: [a-z -]+|AddressSanitizer: [a-z-]+|kernels_equal[a-z_]*|bits_do[a-z_]*|outputs_may[a-z_]*" "$scratch/log" || true)
    verdict="$build: ${why:-fails}"
    break
  done
  [ "$verdict" = SURVIVES ] && survivors=$((survivors + 1))
  printf '%2d  %-45s %s\n' "$i" "$what" "$verdict"
  cp "$file" "$scratch/$file"
done
echo "$survivors survive"
