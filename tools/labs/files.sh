#!/usr/bin/env bash
# A network file system on this machine: a server and three clients, each with its own network.
#   tools/labs/files.sh up moosefs|sshfs|glusterfs   start it; installs Debian's packages if absent
#   tools/labs/files.sh on CLIENT COMMAND…           run a command on a client (c1, c2 or c3)
#   tools/labs/files.sh cut CLIENT|server            take away its network
#   tools/labs/files.sh back CLIENT|server           give the network back
#   tools/labs/files.sh down                         stop it and remove its files (packages stay)
# Needs root, ip, nsenter and /dev/fuse. Client c1 has mounted the file system at LAB/c1, and so on,
# where LAB is MPIGOSSIP_FILES_LAB_DIR (/tmp/mpigossip-files-lab); processes outside can use these
# paths, too. Nothing outside LAB is written: the server has a /run, a /var/log and a /var/lib of
# its own. GlusterFS has three replicas. MPIGOSSIP_FILES_LAB_OPTIONS is added to the mount options.
set -euo pipefail
LAB=${MPIGOSSIP_FILES_LAB_DIR:-/tmp/mpigossip-files-lab}
OPTIONS=${MPIGOSSIP_FILES_LAB_OPTIONS:-}
BRIDGE=mpgfiles0
NET=10.78.0
SERVER=$NET.100
CLIENTS=(c1 c2 c3)

die() {
    printf 'files_lab: %s\n' "$*" >&2
    exit 1
}

hosts() { ip netns list 2>/dev/null | sed -n 's/^mpgfiles-\([a-z0-9]*\).*/\1/p'; }

install_packages() {
    local packages program
    case $1 in
    moosefs) program=mfsmaster packages=(moosefs-master moosefs-chunkserver moosefs-client) ;;
    sshfs) program=sshfs packages=(sshfs openssh-server openssh-client) ;;
    glusterfs) program=glusterd packages=(glusterfs-server glusterfs-client) ;;
    *) die "up $1: give moosefs, sshfs or glusterfs" ;;
    esac
    if command -v "$program" >/dev/null; then return; fi
    command -v apt-get >/dev/null || die "no $program, and no apt-get to install it with"
    echo "installing ${packages[*]}"
    export DEBIAN_FRONTEND=noninteractive
    # This policy prevents the packages from starting services, because the lab starts them itself.
    local policy=/usr/sbin/policy-rc.d made= failed=
    if [ ! -e "$policy" ]; then
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod +x "$policy"
        made=1
    fi
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends "${packages[@]}"; } \
        >"$LAB/install.log" 2>&1 || failed=1
    [ -z "$made" ] || rm -f "$policy"
    [ -z "$failed" ] || die "apt-get could not install ${packages[*]}: $(tail -n 3 "$LAB/install.log")"
}

add_host() {
    local name=$1 address=$2
    ip netns add "mpgfiles-$name"
    ip link add "mpgf-$name" type veth peer name eth0 netns "mpgfiles-$name"
    ip link set "mpgf-$name" master "$BRIDGE" up
    ip -n "mpgfiles-$name" addr add "$address/24" dev eth0
    ip -n "mpgfiles-$name" link set eth0 up
    ip -n "mpgfiles-$name" link set lo up
}

# Mounts stay visible to all, unlike with `ip netns exec`.
in_network() { nsenter --net="/run/netns/mpgfiles-$1" "${@:2}"; }

# A bash script for the server, whose files are in LAB/server.
serve() {
    mkdir -p "$LAB/server/"{run,log,lib,data1,data2,data3}
    # shellcheck disable=SC2016
    in_network server env LAB="$LAB" SERVER="$SERVER" CLIENTS="${CLIENTS[*]}" \
        unshare --mount --uts --propagation private bash -euc '
        mount --bind "$LAB/server/run" /run
        mount --bind "$LAB/server/log" /var/log
        mount --bind "$LAB/server/lib" /var/lib
        mkdir -p /run/gluster /var/log/glusterfs /var/lib/glusterd
        cd "$LAB/server"
        hostname "$SERVER"
        '"$1" >>"$LAB/server.log" 2>&1 </dev/null ||
        die "the server can't start: $(tail -n 3 "$LAB/server.log")"
}

# shellcheck disable=SC2016
serve_moosefs() {
    serve '
        printf "MFSM NEW" >lib/metadata.mfs
        echo "* / rw,alldirs,maproot=0" >exports.cfg
        : >topology.cfg
        printf "%s\n" WORKING_USER=root WORKING_GROUP=root DATA_PATH="$LAB/server/lib" \
            EXPORTS_FILENAME="$LAB/server/exports.cfg" \
            TOPOLOGY_FILENAME="$LAB/server/topology.cfg" LOCK_MEMORY=0 >master.cfg
        echo "$LAB/server/data1" >hdd.cfg
        printf "%s\n" WORKING_USER=root WORKING_GROUP=root DATA_PATH="$LAB/server/log" \
            HDD_CONF_FILENAME="$LAB/server/hdd.cfg" MASTER_HOST="$SERVER" LOCK_MEMORY=0 >chunk.cfg
        mfsmaster -c "$LAB/server/master.cfg" start
        mfschunkserver -c "$LAB/server/chunk.cfg" start'
}

mount_moosefs() { in_network "$1" mfsmount "$LAB/$1" -H "$SERVER" -o "${OPTIONS:-rw}"; }

# shellcheck disable=SC2016
serve_sshfs() {
    serve '
        mkdir -p /run/sshd
        ssh-keygen -q -t ed25519 -N "" -f host
        ssh-keygen -q -t ed25519 -N "" -f user
        printf "%s\n" "HostKey $LAB/server/host" "AuthorizedKeysFile $LAB/server/user.pub" \
            "StrictModes no" "PermitRootLogin yes" "UsePAM no" "PidFile none" \
            "Subsystem sftp internal-sftp" >sshd_config
        /usr/sbin/sshd -f "$LAB/server/sshd_config"'
}

mount_sshfs() {
    in_network "$1" sshfs -o "IdentityFile=$LAB/server/user,UserKnownHostsFile=/dev/null" \
        -o StrictHostKeyChecking=no,LogLevel=ERROR,ControlPath=none \
        -o "${OPTIONS:-dir_cache=no,reconnect,ServerAliveInterval=5,ServerAliveCountMax=3}" \
        "$SERVER:$LAB/server/data1" "$LAB/$1"
}

# shellcheck disable=SC2016
serve_glusterfs() {
    serve '
        printf "%s\n" "volume management" "type mgmt/glusterd" \
            "option working-directory /var/lib/glusterd" "option transport-type socket" \
            "option glusterd-sockfile /run/glusterd.socket" "end-volume" >glusterd.vol
        glusterd --volfile="$LAB/server/glusterd.vol" -p /run/glusterd.pid -l /var/log/glusterd.log
        for _ in $(seq 50); do [ -S /run/glusterd.socket ] && break || sleep 0.2; done
        run() { gluster --glusterd-sock=/run/glusterd.socket --mode=script "$@"; }
        run volume create lab replica 3 "$SERVER:$LAB/server/data1/b" "$SERVER:$LAB/server/data2/b" \
            "$SERVER:$LAB/server/data3/b" force
        run volume start lab'
}

mount_glusterfs() {
    local options=()
    [ -z "$OPTIONS" ] || read -ra options <<<"$OPTIONS"
    in_network "$1" glusterfs --volfile-server="$SERVER" --volfile-id=lab \
        --log-file="$LAB/$1.log" --pid-file="$LAB/$1.pid" "${options[@]}" "$LAB/$1"
}

# Wait until a client can write a file: servers still start after their programs have returned.
wait_for() {
    for _ in $(seq 100); do
        if mountpoint -q "$LAB/$1" && echo 1 2>/dev/null >"$LAB/$1/.up"; then
            rm -f "$LAB/$1/.up"
            return
        fi
        sleep 0.2
    done
    die "$1 can't write to $LAB/$1 after 20 s; its files in $LAB say why; run down"
}

up() {
    local kind=${1:-} k=0
    [ "$(id -u)" = 0 ] || die "needs root: start it as root, for example by sudo"
    [ -c /dev/fuse ] || die "needs /dev/fuse: load the kernel module fuse, or pass the device to the container"
    command -v ip >/dev/null && command -v nsenter >/dev/null || die "needs ip and nsenter (Debian: iproute2, util-linux)"
    unshare --net --mount true 2>/dev/null ||
        die "this machine allows no network namespaces: use another machine, or a privileged container"
    [ -z "$(hosts)" ] || die "is up already; tools/labs/files.sh down stops it"
    mkdir -p "$LAB"
    install_packages "$kind"
    ip link add "$BRIDGE" type bridge
    ip addr add "$NET.254/24" dev "$BRIDGE"
    ip link set "$BRIDGE" up
    add_host server "$SERVER"
    "serve_$kind"
    for client in "${CLIENTS[@]}"; do
        k=$((k + 1))
        add_host "$client" "$NET.$k"
        mkdir -p "$LAB/$client"
        for _ in $(seq 25); do
            "mount_$kind" "$client" >>"$LAB/mount.log" 2>&1 </dev/null && break || sleep 0.2
        done
        wait_for "$client"
    done
    echo "up: $kind in $LAB/c1, $LAB/c2 and $LAB/c3"
}

down() {
    local name
    for name in $(hosts); do
        # All processes there were started by this lab, or in it.
        ip netns pids "mpgfiles-$name" | xargs -r kill -KILL
    done
    for name in "${CLIENTS[@]}"; do umount -l "$LAB/$name" 2>/dev/null || true; done
    for name in $(hosts); do
        ip link del "mpgf-$name" 2>/dev/null || true
        ip netns del "mpgfiles-$name"
    done
    ip link del "$BRIDGE" 2>/dev/null || true
    # Never remove files of a file system that is still mounted.
    rm -rf --one-file-system "$LAB"
    echo "down"
}

# Host names of clients are their addresses, which need no name server.
on() {
    local client=${1:-}
    shift || true
    [[ " ${CLIENTS[*]} " == *" $client "* ]] && [ $# -gt 0 ] || die "on CLIENT COMMAND…: c1, c2 or c3"
    [[ " $(hosts | tr '\n' ' ') " == *" $client "* ]] || die "is not up; tools/labs/files.sh up starts it"
    exec nsenter --net="/run/netns/mpgfiles-$client" unshare --uts -- bash -c 'hostname "$1"; shift; exec "$@"' bash \
        "$NET.${client#c}" "$@"
}

switch() {
    hosts | grep -qx "${2:-}" || die "no host \"${2:-}\"; there are: $(hosts | tr '\n' ' ')"
    ip link set "mpgf-$2" "$1"
}

case ${1:-} in
up) up "${2:-}" ;;
down) down ;;
on) shift && on "$@" ;;
cut) switch down "${2:-}" ;;
back) switch up "${2:-}" ;;
*) die "pass up moosefs|sshfs|glusterfs, on CLIENT COMMAND…, cut HOST, back HOST, or down" ;;
esac
