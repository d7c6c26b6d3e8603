#!/usr/bin/env bash
# mpirun for train_gpt, with all of its options:
#   scripts/launch/mpirun.sh -n 8 build/train_gpt CONFIG.json
# Adds openmpi.conf, and makes of SIGTERM (kill, docker stop, Kubernetes, systemd) a SIGUSR1, at which the ranks save and
# end with 0. mpirun itself would kill them a second after SIGTERM.
set -u
mpirun --tune "$(dirname "$(realpath "$0")")/openmpi.conf" "$@" <&0 &
run=$!
trap 'kill -USR1 $run' TERM
trap : INT # Ctrl-C reaches mpirun, too

# A signal ends `wait`, not the run.
wait $run
status=$?
while kill -0 $run 2>/dev/null; do
  wait $run
  status=$?
done
exit $status
