#!/usr/bin/env bash
# Runs GoogleTest programs: run_tests.sh PROGRAM..., TEST_JOBS (1) of them at a time. Prints what fails, and ends with
# one line "N passed, N failed, N skipped". A program that dies counts as one failure. Adds the counts of earlier calls
# that share the file named by TEST_TALLY, so that several flavours end in one line.
set -uo pipefail

passed=0 failed=0 skipped=0
if [ -n "${TEST_TALLY:-}" ] && [ -s "$TEST_TALLY" ]; then read -r passed failed skipped <"$TEST_TALLY"; fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Tests of many ranks: 8, of one thread each, however many cores there are.
mpirun=(env OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMP_NUM_THREADS=1
  timeout 600 mpirun --oversubscribe --bind-to none -n 8)

# run_program PROGRAM NAME: its output in $work/NAME.log; says how it went, and leaves the counts in $work/NAME.
run_program() {
  local program=$1 log=$work/$2.log start=$SECONDS launch=() status ok bad skip
  case $program in
    */distributed/*) launch=("${mpirun[@]}") ;;
    */cudnn/*) launch=(env "LD_LIBRARY_PATH=$PWD/build/cudnn_driver") ;; # a driver of stubs
  esac
  "${launch[@]}" "$program" --gtest_brief=0 --gtest_color=no >"$log" 2>&1
  status=$?
  ok=$(grep -cE '^\[ +OK \]' "$log")
  bad=$(sed -n 's/^\[  FAILED  \] \([0-9]*\) tests\?.*/\1/p' "$log" | head -1)
  skip=$(sed -n 's/^\[  SKIPPED \] \([0-9]*\) tests\?.*/\1/p' "$log" | head -1)
  {
    if [ "$status" -ne 0 ] && [ "${bad:-0}" -eq 0 ]; then
      bad=1 # it died
      echo "---- $program ended with status $status"
      tail -40 "$log"
    elif [ "$status" -ne 0 ]; then
      echo "---- $program"
      grep -vE '^\[( +OK |-+| RUN +)' "$log" | head -80
    fi
    printf '%-60s %4d passed %s(%d s)\n' "${program#build/}" "$ok" "${bad:+$bad FAILED }${skip:+$skip skipped }" $((SECONDS - start))
  } >"$work/$2.report"
  cat "$work/$2.report" # in one piece
  echo "$ok ${bad:-0} ${skip:-0}" >"$work/$2"
}

running=0 count=0
for program in "$@"; do
  if [ "$running" -ge "${TEST_JOBS:-1}" ]; then wait -n; else running=$((running + 1)); fi
  run_program "$program" "$count" &
  count=$((count + 1))
done
wait
for ((i = 0; i < count; i++)); do
  read -r ok bad skip <"$work/$i"
  passed=$((passed + ok)) failed=$((failed + bad)) skipped=$((skipped + skip))
done

if [ -n "${TEST_TALLY:-}" ]; then echo "$passed $failed $skipped" >"$TEST_TALLY"; fi
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
