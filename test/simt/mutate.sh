#!/bin/bash
# Breaks kernels in one place at a time and shows which build's tests notice. By hand: make simt-mutate
# (a scratch copy of the tree). Arguments choose mutants by number. A survivor is a missing test, or is explained in
# README.md.
set -eu
cd "$(dirname "$0")/../.."

# file | what | sed expression, which must change exactly one line
mutants=(
  # barriers
  "layers/core/cuda_util.cuh|no barrier before of_warp is read|/if (lane == 0) of_warp/{n;s/__syncthreads();//}"
  "layers/core/cuda_util.cuh|no barrier after of_warp is read|s/__syncthreads();  \/\/ of_warp.*//"
  "layers/rmsnorm_row.cuh|no barrier before the teams' sums|/void add_teams(/{n;s/__syncthreads();//}"
  "layers/rmsnorm.cu|no barrier before the last 8 sums|/sums\[threadIdx.y\]\[threadIdx.x\] = sum;/{n;s/__syncthreads();//}"
  # guards
  "layers/rmsnorm.cu|row guard off by one|s/if (row >= rows) return;/if (row > rows) return;/"
  "layers/rmsnorm.cu|column guard of the slots off by one|s/c >= C) return;/c > C) return;/"
  "layers/rmsnorm.cu|all eight rows of threads add to dw|s/if (threadIdx.y > 0 || c >= C)/if (c >= C)/"
  "layers/core/cuda_util.cuh|odd rows taken for packable|s/bool packable = C % kPackWidth<T> == 0;/bool packable = C >= kPackWidth<T>;/"
  "layers/core/cuda_util.cuh|alignment not asked|s/reinterpret_cast<uintptr_t>(p) % 16 == 0/p != nullptr/"
  "layers/core/cuda_util.cuh|sums of absent warps|s/lane < kWarps ? of_warp\[lane\] : T(0)/of_warp[lane % kWarps]/"
  "layers/core/cuda_util.cuh|every lane writes the warp's sum|s/if (lane == 0) of_warp/if (lane <= 1) of_warp/"
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
  "layers/rmsnorm_row.cuh|s squared for s cubed|s/(gx) \* s \* s \* s/(gx) * s * s/"
  "layers/rmsnorm_row.cuh|eps forgotten|s/static_cast<float>(C) + eps)/static_cast<float>(C))/"
  "layers/rmsnorm_row.cuh|Plain rounds once|s/from_float<T>(wk \* to_float(from_float<T>(xhat)))/from_float<T>(wk * xhat)/"
  "layers/rmsnorm_row.cuh|LateCast rounds twice|s/: from_float<T>((one_plus + wk) \* xhat)/: from_float<T>((one_plus + wk) * to_float(from_float<T>(xhat)))/"
  "layers/rmsnorm_row.cuh|OnePlus forgotten in the sum|s/\* (one_plus + to_float(wp.element\[k\])) \* to_float(xp/* to_float(wp.element[k]) * to_float(xp/"
  "layers/rmsnorm_row.cuh|dw without s|s/\*sums += dyk \* xk \* s;/*sums += dyk * xk;/"
  # the gate
  "layers/gated_act.cu|column guard of the forward off by one|/gated_act_forward_kernel(T/,/^}/s/at.f >= F/at.f > F/"
  "layers/gated_act.cu|column guard of the backward off by one|/gated_act_backward_kernel(T/,/^}/s/at.f >= F/at.f > F/"
  "layers/gated_act.cu|up taken for gate|/gated_act_forward_kernel(T/,/^}/s/up = load_pack<kWidth>(gate + F)/up = load_pack<kWidth>(gate)/"
  "layers/gated_act.cu|every block takes the first part of a row|s/f((int64_t{blockIdx.x % blocks_per_row} \* blockDim.x/f((int64_t{0 * blocks_per_row} * blockDim.x/"
  "layers/gated_act.cu|d_gate and d_up swapped|s/store_pack<kWidth>(d_gate, dzp);/store_pack<kWidth>(d_gate, dup);/"
  "layers/gated_act.cu|slope forgotten|s/(1.0f - g.sigmoid) \* g.slope/(1.0f - g.sigmoid)/"
  "layers/gated_act.cu|sign of the exponent|s/expf(-a)/expf(a)/"
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
)

# The tests of the kernels, cheapest build first.
builds="plain check asan"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
git ls-files -z | xargs -0 cp -p --parents -t "$scratch"
mkdir -p "$scratch/build"
[ -d build/simt ] && cp -a build/simt "$scratch/build/"

# BUILD FILE: the test of the kernels in that file; of what kernels share, RMSNorm's.
program() {
  case "$2" in
    layers/core/* | *.cuh) echo "build/simt/$1/rmsnorm_simt_test" ;;
    *) echo "build/simt/$1/$(basename "$2" .cu)_simt_test" ;;
  esac
}
compile() { make -s -C "$scratch" "$(program "$1" "$2")" > "$scratch/log" 2>&1; }
passes() { (cd "$scratch" && timeout 600 "$(program "$1" "$2")" --gtest_brief=1 > "$scratch/log" 2>&1); }

for file in $(printf '%s\n' "${mutants[@]}" | cut -d'|' -f1 | sort -u); do
  for build in $builds; do
    if ! { compile "$build" "$file" && passes "$build" "$file"; }; then
      tail -20 "$scratch/log"
      echo "the tests fail without a mutation"
      exit 1
    fi
  done
done

survivors=0
for i in "${!mutants[@]}"; do
  [ $# -eq 0 ] || [[ " $* " == *" $i "* ]] || continue
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
