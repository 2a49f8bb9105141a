#!/usr/bin/env bash
# Several virtual hosts on this machine: network namespaces that are connected by links of a given rate.
#   tools/labs/net.sh up [HOSTS] [RATE] [MS]   start them; by default 4 hosts, 1gbit, no added latency
#   tools/labs/net.sh run RANKS COMMAND…       run a command on RANKS ranks, each on its own host
#   tools/labs/net.sh on HOST COMMAND…         run a command on one host (h1, h2, …)
#   tools/labs/net.sh down                     stop them
# This needs root, ip and tc. The launcher is MPIGOSSIP_MPIEXEC, or mpiexec on PATH (MPICH or Open MPI).
# Each host has its own network, host name and IPC, so that MPI communicates over the network; files are
# shared, as on a cluster. Links have a rate and short queues, as in switches. Each message between two
# hosts is delayed by MS milliseconds (tools/labs/latency.py, which needs python3 and /dev/net/tun). TCP
# is configured as on clusters: cubic, without a slow start after each pause.
# MPIGOSSIP_NET_LAB_BURST (256kb) and MPIGOSSIP_NET_LAB_QUEUE (10ms) are the burst and the queue of the
# token bucket filter of each link.
set -euo pipefail
LAB=${MPIGOSSIP_NET_LAB_DIR:-/tmp/mpigossip-net-lab}
BRIDGE=mpglab0
NET=10.77.0

die() {
    printf 'net_lab: %s\n' "$*" >&2
    exit 1
}

hosts() { ip netns list 2>/dev/null | sed -n 's/^mpglab-\(h[0-9]*\).*/\1/p' | sort -V; }

shape() { tc "${@:2}" qdisc add dev "$1" root tbf rate "$RATE" burst "${MPIGOSSIP_NET_LAB_BURST:-256kb}" latency "${MPIGOSSIP_NET_LAB_QUEUE:-10ms}"; }

add_host() {
    local k=$1 name=mpglab-h$1
    ip netns add "$name"
    if [ "$LATENCY" = 0 ]; then
        ip link add "mpglab-v$k" type veth peer name eth0 netns "$name"
    else
        ip link set "mpglab-t$k" netns "$name" name eth0
    fi
    ip link set "mpglab-v$k" master "$BRIDGE" up
    ip -n "$name" addr add "$NET.$k/24" dev eth0
    ip -n "$name" link set eth0 up
    ip -n "$name" link set lo up
    ip -n "$name" route change "$NET.0/24" dev eth0 proto kernel scope link src "$NET.$k" congctl cubic
    ip netns exec "$name" sysctl -qw net.ipv4.tcp_slow_start_after_idle=0
    shape "mpglab-v$k"
    shape eth0 -n "$name"
}

# Create TAP devices, between which a program forwards frames, in place of veth pairs.
start_latency() {
    local count=$1 pairs
    pairs=$(for k in $(seq "$count"); do printf 'mpglab-t%s:mpglab-v%s ' "$k" "$k"; done)
    : >"$LAB/latency"
    # shellcheck disable=SC2086
    python3 "$(dirname "$0")/latency.py" "${LATENCY}e-3" $pairs >"$LAB/latency" 2>&1 </dev/null &
    echo $! >"$LAB/latency.pid"
    for _ in $(seq 100); do
        grep -q ready "$LAB/latency" && return
        sleep 0.05
    done
    die "up … $LATENCY: $(tail -1 "$LAB/latency")"
}

end_latency() {
    local pid
    pid=$(cat "$LAB/latency.pid" 2>/dev/null) || return 0
    # Another program may have got this number in the meantime.
    grep -qs latency.py "/proc/$pid/cmdline" && kill "$pid" || true
}

up() {
    local count=${1:-4}
    RATE=${2:-1gbit}
    LATENCY=${3:-0}
    [[ $count =~ ^[1-9][0-9]?$ ]] || die "up $count: give a number of hosts from 1 to 99"
    [[ $RATE =~ ^[0-9]+[kmg]bit$ ]] || die "up … $RATE: give a rate such as 200mbit or 1gbit"
    [[ $LATENCY =~ ^[0-9]+(\.[0-9]+)?$ ]] || die "up … $LATENCY: give milliseconds such as 5 or 0.1"
    [ "$(id -u)" = 0 ] || die "needs root: start it as root, for example by sudo"
    command -v tc ip >/dev/null || die "needs ip and tc (Debian: iproute2)"
    [ -z "$(hosts)" ] || die "is up already; tools/labs/net.sh down stops it"
    mkdir -p "$LAB"
    ip link add "$BRIDGE" type bridge
    ip addr add "$NET.254/24" dev "$BRIDGE"
    ip link set "$BRIDGE" up
    [ "$LATENCY" = 0 ] || start_latency "$count"
    for k in $(seq "$count"); do add_host "$k"; done
    write_ssh
    echo "up: $count hosts, $RATE each$([ "$LATENCY" = 0 ] || echo ", $LATENCY ms each way")"
}

# Write a script that launchers use in place of ssh: [OPTIONS] HOST COMMAND…
write_ssh() {
    cat >"$LAB/ssh" <<END
#!/usr/bin/env bash
# Ignore options of ssh, none of which has a value here.
while [ "\${1#-}" != "\$1" ]; do shift; done
host=\${1##*@}
case \$host in $NET.*) host=h\${host##*.} ;; esac
shift
exec ip netns exec "mpglab-\$host" unshare --uts --ipc -- \\
    bash -c 'hostname "\$1"; shift; exec bash -c "\$*"' bash "\$host" "\$@"
END
    chmod +x "$LAB/ssh"
}

down() {
    local name
    for name in $(hosts); do
        # All processes there were started by this lab, or in it.
        ip netns pids "mpglab-$name" | xargs -r kill -KILL
        ip netns del "mpglab-$name"
        ip link del "mpglab-v${name#h}" 2>/dev/null || true
    done
    end_latency
    ip link del "$BRIDGE" 2>/dev/null || true
    rm -rf "$LAB"
    echo "down"
}

run() {
    local ranks=${1:-} launcher list
    shift || true
    [[ $ranks =~ ^[1-9][0-9]*$ ]] && [ $# -gt 0 ] ||
        die "run ${ranks:-without arguments}: pass a number of ranks and a command, run RANKS COMMAND…"
    mapfile -t names < <(hosts)
    [ ${#names[@]} -gt 0 ] || die "is not up; tools/labs/net.sh up starts it"
    [ "$ranks" -le ${#names[@]} ] ||
        die "run $ranks: each rank needs a host, but only ${#names[@]} are up: run down, then up $ranks"
    # The launcher gets addresses, because it can't resolve the names of these hosts.
    list=$(for k in $(seq "$ranks"); do printf '%s.%s,' "$NET" "$k"; done)
    read -ra launcher <<<"${MPIGOSSIP_MPIEXEC:-mpiexec}"
    if "${launcher[@]}" --version 2>&1 | grep -qi 'open mpi\|openrte\|prrte'; then
        export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_osc=^ucx
        exec "${launcher[@]}" --prtemca plm_ssh_agent "$LAB/ssh" --prtemca prte_if_include \
            "$NET.0/24" --host "${list//,/:1,}" --map-by node --mca pml ob1 --mca btl tcp,self \
            --mca btl_tcp_if_include eth0 -n "$ranks" "$@"
    fi
    export MPIR_CVAR_CH4_NETMOD=ofi FI_PROVIDER=tcp FI_TCP_IFACE=eth0
    exec "${launcher[@]}" -launcher ssh -launcher-exec "$LAB/ssh" -iface "$BRIDGE" \
        -hosts "${list%,}" -ppn 1 -n "$ranks" "$@"
}

on() {
    local host=${1:-}
    shift || true
    hosts | grep -qx "$host" || die "no host \"$host\"; there are: $(hosts | tr '\n' ' ')"
    exec ip netns exec "mpglab-$host" unshare --uts --ipc -- \
        bash -c "hostname $host; exec \"\$@\"" bash "$@"
}

case ${1:-} in
up) up "${2:-}" "${3:-}" "${4:-}" ;;
down) down ;;
run) shift && run "$@" ;;
on) shift && on "$@" ;;
*) die "pass up [HOSTS] [RATE] [MS], run RANKS COMMAND…, on HOST COMMAND…, or down" ;;
esac
