#!/bin/bash
# Fails when a CUDA kernel has no SIMT test: every __global__ function in layers/ must be named, as "name", in a
# test/simt/*_test.cpp, which asks simt_launched_kernels() whether it ran; and the table of kernels has it.
set -eu
cd "$(dirname "$0")/.."

missing=0
for file in $(find layers -name '*.cu' -o -name '*.cuh' | sort); do
  # `__global__ void [__launch_bounds__(...)] name(`, perhaps over several lines
  for kernel in $(tr '\n' ' ' < "$file" |
                  grep -oP '__global__\s+void\s+(__launch_bounds__\s*\([^()]*(\([^()]*\)[^()]*)*\)\s*)?\K\w+(?=\s*\()'); do
    if ! grep -qF "\"$kernel\"" test/simt/*_test.cpp; then
      echo "$file: kernel $kernel has no SIMT test: name it in a test/simt/*_test.cpp (see test/simt/README.md)" >&2
      missing=1
    fi
    if ! grep -q "| $kernel\b" test/simt/kernels.md; then
      echo "$file: kernel $kernel is not in test/simt/kernels.md: run make kernel-table" >&2
      missing=1
    fi
  done
done
exit $missing
