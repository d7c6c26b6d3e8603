#!/usr/bin/env bash
# Runs an MPI program on two hosts of its own: network and host-name namespaces on this machine, joined by one cable.
#   two_hosts.sh RANKS_PER_HOST PROGRAM [ARGUMENT...]
#   CUT_WHEN=FILE    the cable is cut when this file appears
#   KEEPALIVE=SECONDS    after which Open MPI asks whether a silent host is still there (default 3; it asks for 2 more)
#   LIMIT=SECONDS    ends everything, with status 124 (default 60)
# Prints "skipped: REASON" and ends with 77 where the kernel, the user or the program does not allow it. Everything runs
# in a process namespace of its own, which takes processes, interfaces and shared memory with it however it ends.
set -euo pipefail

skip() {
  echo "skipped: $1"
  exit 77
}

outside() {
  local tool why isolate=(unshare --mount --net --uts --ipc --pid --mount-proc --fork --kill-child)
  for tool in ip nsenter mpirun; do command -v $tool >/dev/null || skip "no program '$tool'"; done
  [[ $(ldd "$2") == *libmpi* ]] || skip "$2 is built without MPI"
  [ "$(id -u)" = 0 ] || isolate+=(--map-root-user)
  why=$("${isolate[@]}" true 2>&1) || skip "$why"
  # SIGTERM would end `unshare` only after what runs in it: the limit comes from inside, and a kill from outside is -9.
  exec "${isolate[@]}" -- "$0" --inside "$@"
}

inside() {
  local ranks=$1 dir=/dev/shm host1
  shift
  mount -t tmpfs none $dir

  hostname host0
  unshare --net --uts sh -c 'hostname host1; exec sleep infinity' &
  host1=$!
  until [ "$(nsenter -t $host1 -n -u hostname)" = host1 ]; do sleep 0.02; done
  ip link add cable type veth peer name cable netns $host1 || skip 'no veth devices'
  ip addr add 10.77.0.1/24 dev cable
  nsenter -t $host1 -n ip addr add 10.77.0.2/24 dev cable
  for dev in lo cable; do ip link set $dev up; nsenter -t $host1 -n ip link set $dev up; done

  # What mpirun takes for ssh (and would pass -x, were it named so).
  printf '#!/bin/sh\nshift\nexec nsenter -t %d -n -u sh -c "$*"\n' $host1 >$dir/enter
  chmod +x $dir/enter
  # The settings of users, but a host that is cut off is noticed sooner.
  sed "s/time 30/time ${KEEPALIVE:-3}/; s/intvl 5/intvl 1/; s/probes 6/probes 2/" scripts/launch/openmpi.conf >$dir/openmpi.conf
  if [ -n "${CUT_WHEN:-}" ]; then
    { until [ -e "$CUT_WHEN" ]; do sleep 0.02; done; ip link set cable down; } &
  fi

  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 TMPDIR=$dir
  timeout -k 2 "${LIMIT:-60}" mpirun --tune $dir/openmpi.conf --mca plm_rsh_agent $dir/enter --mca btl self,vader,tcp \
    --mca oob_tcp_if_include 10.77.0.0/24 --mca btl_tcp_if_include 10.77.0.0/24 -x OMP_NUM_THREADS=1 \
    -H "10.77.0.1:$ranks,10.77.0.2:$ranks" "$@"
}

if [ "$1" = --inside ]; then
  inside "${@:2}"
else
  outside "$@"
fi
