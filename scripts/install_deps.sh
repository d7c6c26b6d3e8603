#!/usr/bin/env bash
# Installs what a target needs and this machine lacks, from Debian's packages: install_deps.sh build|test|lint|fuzz|python.
# Does nothing, and needs no root, where everything is there. Called by make.
set -euo pipefail

need=()
want() {  # want PACKAGE TEST...: installs PACKAGE unless the test succeeds
  local package=$1
  shift
  "$@" >/dev/null 2>&1 || need+=("$package")
}
clang_version() {
  if command -v clang++ >/dev/null; then
    clang++ --version | sed -n 's/.*version \([0-9]*\).*/\1/p' | head -1
  else
    apt-cache depends clang 2>/dev/null | sed -n 's/.*Depends: clang-\([0-9]*\).*/\1/p' | head -1
  fi
}
has_header() { echo "#include <$1>" | ${CXX:-g++} -std=c++20 -E -x c++ - ; }

for group in "$@"; do
  case $group in
    build)
      want g++ command -v "${CXX:-g++}"
      want libfmt-dev has_header fmt/format.h
      want nlohmann-json3-dev has_header nlohmann/json.hpp
      want libcli11-dev has_header CLI/CLI.hpp
      if [ "${MPI:-1}" = 1 ]; then
        want libopenmpi-dev command -v mpicxx
        want openmpi-bin command -v mpirun
      fi
      ;;
    test)
      want libgtest-dev has_header gtest/gtest.h
      want iproute2 command -v ip  # two hosts
      want procps command -v pgrep
      ;;
    lint)
      want clang-format command -v clang-format
      want shellcheck command -v shellcheck
      ;;
    fuzz)
      want clang command -v clang++
      # Debian splits the fuzzer's run time off; its package carries the version of clang.
      want "libclang-rt-$(clang_version)-dev" bash -c \
        'echo "extern \"C\" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }" |
         clang++ -fsanitize=fuzzer -x c++ - -o /dev/null'
      ;;
    python) want python3-venv python3 -c 'import ensurepip' ;;
    *)
      echo "install_deps.sh: unknown group '$group'" >&2
      exit 2
      ;;
  esac
done

[ ${#need[@]} -eq 0 ] && exit 0
# Without a compiler no header was found: that is the fresh machine, where each of them is missing too.
if ! command -v apt-get >/dev/null; then
  echo "Missing: ${need[*]} (Debian's package names). This is no Debian: install them with your package manager." >&2
  exit 1
fi
sudo=
if [ "$(id -u)" != 0 ]; then
  command -v sudo >/dev/null || {
    echo "Missing packages: ${need[*]}. Run as root: apt-get install ${need[*]}" >&2
    exit 1
  }
  sudo=sudo
fi
echo "Installing ${need[*]}"
export DEBIAN_FRONTEND=noninteractive
$sudo apt-get update -qq
need=("${need[@]/libclang-rt--dev/libclang-rt-$(clang_version)-dev}")  # the version is known from now on
$sudo apt-get install -y -qq --no-install-recommends "${need[@]}" >/dev/null
