#!/usr/bin/env bash
# Fetches the headers of cuDNN's frontend from PyPI: fetch_cudnn_frontend.sh REQUIREMENTS DIR makes DIR/include/. pip
# checks the hash of the wheel. Called by make, once.
set -euo pipefail

requirements=$1 dir=$2
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
if ! python3 -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes --requirement "$requirements" \
  --only-binary :all: --implementation cp --python-version 3.11 --abi cp311 --platform manylinux_2_28_x86_64 \
  --dest "$wheels"; then
  echo "The headers of cuDNN's frontend could not be fetched (see above). Fetch them elsewhere and name their place by" >&2
  echo "make CUDNN_FRONTEND=DIR, where DIR/include/cudnn_frontend.h is, or build without: make CUDNN=0" >&2
  exit 1
fi
python3 -m zipfile -e "$wheels"/*.whl "$wheels/files"
rm -rf "$dir"
mkdir -p "$dir"
cp -R "$wheels/files/include" "$dir/"
touch "$dir/include/cudnn_frontend.h"
