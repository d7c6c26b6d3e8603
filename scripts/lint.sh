#!/usr/bin/env bash
# The rules of the house that a machine can check: format, include order, shell, stand-alone. Prints each breach.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
status=0
breach() {
  echo "lint: $1"
  [ -n "${2:-}" ] && echo "$2"
  status=1
}
files() { git ls-files --cached --others --exclude-standard -- "$@"; }
# check MESSAGE GREP-ARGUMENTS...: a breach for every line that git grep finds
check() {
  local message=$1 found
  shift
  found=$(git grep --untracked -nE "$@") && breach "$message" "$found"
}

mapfile -t sources < <(files '*.cpp' '*.h' '*.cu' '*.cuh')
clang-format --dry-run -Werror "${sources[@]}" || breach 'not formatted: run clang-format -i on these files (make format)'

mapfile -t scripts < <(files '*.sh' '*.sbatch' .ci/run)
shellcheck "${scripts[@]}" || breach 'shellcheck'

# Who may include whom: layers/core <- layers <- comm <- llama <- train_gpt.cu, layers/core <- data <- llama.
check 'layers/core includes nothing but itself' '#include "(layers/[a-z_]+\.|comm/|data/|llama/|test/)' -- layers/core
check 'layers include layers' '#include "(comm|data|llama|test)/' -- layers
check 'comm includes layers and comm' '#include "(data|llama|test)/' -- comm
check 'data includes layers/core and data' '#include "(comm|llama|test|layers/[a-z_]+\.h)' -- data
check 'llama does not include test' '#include "test/' -- llama train_gpt.cu
check 'CUDA headers belong in .cu and .cuh' '#include <(cuda|cublas|cudnn|nccl)' -- '*.cpp' '*.h' ':!test/simt'
check 'mpi.h belongs in comm/' '#include <mpi\.h>' -- ':!comm'
check 'no #ifdef outside the device seam' '^#[[:space:]]*if' -- '*.cpp' '*.h' train_gpt.cu ':!layers/core/device.h' ':!test/simt'
check 'no CUDA launch in train_gpt.cu' '<<<' -- train_gpt.cu

check 'the repository stands alone' '\.\./shared|/work/' -- ':!scripts/lint.sh'
check 'nothing is left for later' '\b(TODO|FIXME|XXX)\b' -- '*.cpp' '*.h' '*.cu' '*.cuh' '*.py' '*.sh' Makefile ':!scripts/lint.sh'

scripts/lint_simt.sh || status=1
[ $status -eq 0 ] && echo 'lint: ok'
exit $status
