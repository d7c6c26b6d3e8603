#!/usr/bin/env bash
# make bench: kernels, then the program against PyTorch; writes test/bench/results/<date>-<commit>.md.
set -euo pipefail
kernels=$1
out=test/bench/results/$(date +%F)-$(git rev-parse --short HEAD)$(git diff --quiet HEAD || echo -dirty).md
mkdir -p "$(dirname "$out")"
text=$(mktemp)
trap 'rm -f "$text"' EXIT
export OMP_PROC_BIND=true
"$kernels" | tee "$text"
peak=$(sed -n 's/.*multiply-add peak[^0-9]*\([0-9.]*\).*/\1/p' "$text" | head -1)
unset OMP_PROC_BIND
.venv/bin/python scripts/bench.py --fma-peak "${peak:-0}" --ranks --out "$out"
{
  printf '\n## Kernels\n\n```\n'
  cat "$text"
  printf '```\n'
} >>"$out"
echo "written to $out"
