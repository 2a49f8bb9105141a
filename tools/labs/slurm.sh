#!/usr/bin/env bash
# A Slurm cluster of several virtual nodes on this machine, to test batch scripts.
#   tools/labs/slurm.sh up [NODES]     start it, with 4 nodes by default; install Debian's Slurm if missing
#   tools/labs/slurm.sh run COMMAND…   run a command with this Slurm: sbatch, srun, squeue, scontrol, …
#   tools/labs/slurm.sh down           stop it and remove its files (the packages remain)
# It needs root, and apt if Slurm is not installed. It writes only to the lab's folder, and does not
# affect another Slurm of this machine, because it has other ports and another configuration.
# srun starts programs with the MPICH wheel; for Open MPI, use srun --mpi=pmix.
set -euo pipefail
LAB=${MPIGOSSIP_SLURM_LAB_DIR:-/tmp/mpigossip-slurm-lab}
PORT=${MPIGOSSIP_SLURM_LAB_PORT:-16817}
export SLURM_CONF=$LAB/slurm.conf

die() {
    printf 'slurm_lab: %s\n' "$*" >&2
    exit 1
}

install_slurm() {
    if command -v slurmctld >/dev/null && command -v slurmd >/dev/null &&
        compgen -G '/usr/lib/*/pmix*/lib/libpmix.so' >/dev/null; then return; fi
    command -v apt-get >/dev/null || die "no slurmctld or no libpmix.so, and no apt-get to install it with"
    echo "installing slurm-wlm and munge (about a minute)"
    export DEBIAN_FRONTEND=noninteractive
    # This policy prevents the packages from starting services, because the lab starts them itself.
    local policy=/usr/sbin/policy-rc.d made=
    if [ ! -e "$policy" ]; then
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod +x "$policy"
        made=1
    fi
    local log=$LAB/install.log failed=
    # srun --mpi=pmix loads libpmix.so by a name that only the package libpmix-dev has.
    { apt-get update -qq &&
        apt-get install -y -qq --no-install-recommends slurm-wlm munge libpmix-dev; } \
        >"$log" 2>&1 || failed=1
    [ -z "$made" ] || rm -f "$policy"
    [ -z "$failed" ] || die "apt-get could not install slurm-wlm: $(tail -n 3 "$log")"
}

write_configuration() {
    local nodes=$1 host cpus
    host=$(hostname -s)
    cpus=$(env -u OMP_NUM_THREADS nproc)
    mkdir -p "$LAB/state" "$LAB/log"
    for k in $(seq "$nodes"); do mkdir -p "$LAB/spool/lab$k" "$LAB/tmp/lab$k"; done
    cat >"$LAB/cgroup.conf" <<END
CgroupPlugin=cgroup/v1
CgroupAutomount=no
END
    # Each node is a slurmd with its own port. proctrack/linuxproc and task/none need no cgroups, so
    # that this works inside a container. Job numbers differ from those of earlier labs: MPICH names
    # shared memory by them, and would report "out of memory" if a killed rank had left such a segment.
    cat >"$SLURM_CONF" <<END
ClusterName=lab
FirstJobId=$(($(date +%s) % 60000000 + 1))
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$PORT
AuthType=auth/munge
AuthInfo=socket=$LAB/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$LAB/state
SlurmdSpoolDir=$LAB/spool/%n
SlurmctldPidFile=$LAB/slurmctld.pid
SlurmdPidFile=$LAB/%n.pid
SlurmctldLogFile=$LAB/log/slurmctld.log
SlurmdLogFile=$LAB/log/%n.log
TmpFS=$LAB/tmp/%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SwitchType=switch/none
MpiDefault=pmi2
ReturnToService=2
SchedulerParameters=batch_sched_delay=1,sched_interval=5,bf_interval=5
NodeName=lab[1-$nodes] NodeHostname=$host NodeAddr=127.0.0.1 Port=[$((PORT + 1))-$((PORT + nodes))] CPUs=$cpus State=UNKNOWN
PartitionName=lab Nodes=ALL Default=YES MaxTime=INFINITE State=UP
END
}

start_munge() {
    dd if=/dev/urandom of="$LAB/munge.key" bs=1024 count=1 status=none
    chmod 600 "$LAB/munge.key"
    # Without --force, munged rejects this folder, because it is in /tmp.
    munged --force --key-file="$LAB/munge.key" --socket="$LAB/munge.socket" \
        --pid-file="$LAB/munged.pid" --log-file="$LAB/log/munged.log" --seed-file="$LAB/munge.seed" \
        2>"$LAB/log/munged.start" || die "munged does not start: $(cat "$LAB/log/munged.start")"
}

up() {
    local nodes=${1:-4}
    [[ $nodes =~ ^[1-9][0-9]?$ ]] || die "up $nodes: give a number of nodes from 1 to 99"
    [ "$(id -u)" = 0 ] || die "needs root: start it as root, for example by sudo"
    [ ! -e "$LAB/up" ] || die "is up already ($LAB); tools/labs/slurm.sh down stops it"
    mkdir -p "$LAB"
    chmod 755 "$LAB"
    install_slurm
    write_configuration "$nodes"
    start_munge
    touch "$LAB/up"
    slurmctld -c
    for k in $(seq "$nodes"); do slurmd -N "lab$k"; done
    local begin=$SECONDS
    until [ "$(sinfo -h -r -t idle -o %D 2>/dev/null | head -n 1)" = "$nodes" ]; do
        if [ $((SECONDS - begin)) -gt 60 ]; then
            tail -n 5 "$LAB"/log/*.log >&2
                die "the nodes were not idle after 60 s: see the logs in $LAB/log, run down, and try again"
        fi
        sleep 0.5
    done
    echo "up: $nodes nodes. tools/labs/slurm.sh run sinfo; or export SLURM_CONF=$SLURM_CONF"
}

# end FILE NAME: end the process whose number is in FILE, if it runs the program NAME.
end() {
    local file=$1 name=$2 pid
    pid=$(cat "$file" 2>/dev/null) || return 0
    [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = "$name" ] || return 0
    kill "$pid" 2>/dev/null || return 0
    for _ in $(seq 100); do
        [ -d "/proc/$pid" ] || return 0
        sleep 0.1
    done
    kill -KILL "$pid" 2>/dev/null || true
}

down() {
    [ -e "$LAB/slurm.conf" ] || {
        echo "slurm_lab: is not up"
        return
    }
    timeout 10 scancel --state=RUNNING,PENDING --user=root 2>/dev/null || true
    sleep 1
    for file in "$LAB"/lab*.pid; do end "$file" slurmd; done
    end "$LAB/slurmctld.pid" slurmctld
    end "$LAB/munged.pid" munged
    rm -rf "$LAB"
    echo "down"
}

run() {
    [ -e "$LAB/up" ] || die "is not up; tools/labs/slurm.sh up starts it"
    [ $# -gt 0 ] || die "run needs a command: pass one, such as run sinfo"
    # Jobs inherit these variables. On a busy machine, pmi2 of Slurm 22.05 fails to parse the long
    # addresses of MPICH's UCX (seen on 2026-11-20: "request not begin with 'cmd='"). Addresses of TCP
    # are short.
    export MPIR_CVAR_CH4_NETMOD=ofi FI_PROVIDER=tcp
    exec "$@"
}

case ${1:-} in
up) up "${2:-}" ;;
down) down ;;
run) shift && run "$@" ;;
*) die "pass up [NODES], run COMMAND…, or down" ;;
esac
