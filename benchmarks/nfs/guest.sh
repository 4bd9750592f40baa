#!/bin/sh
# The first process of a User-Mode Linux guest: an NFS server and two clients on one kernel.
#
# Its root is the host's file system (hostfs); everything that is written lies on a tmpfs of the
# guest, except the report. Each client is a network namespace with a host name and a veth pair of
# its own, so the kernel gives it an NFS client, a connection and caches of its own. netem delays
# what client and server send, each by half of the round trip.
#
# From the kernel's command line: PYTHON, SCRIPT, SOURCE, MODULES (the guest kernel's), VERSIONS (e.g. "4.2,3"),
# RTT_MS, PARTS, MBIT where links are to carry so many Mbit/s, and SIZES for the part `scale`. /run is a tmpfs of the guest: nothing there is the host's.

export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/run TMPDIR=/run
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs run /run
mkdir -p /dev/shm
mount -t tmpfs shm /dev/shm
echo "guest: $(uname -r)"

finish() {
    echo "guest: status $1"
    echo o >/proc/sysrq-trigger 2>/dev/null
    poweroff -f 2>/dev/null || halt -f
}

mkdir -p /run/kernel/lib/modules /run/host
ln -s "$MODULES/$(uname -r)" "/run/kernel/lib/modules/$(uname -r)"
for module in veth sch_netem nfsd nfsv4 nfsv3; do
    modprobe -d /run/kernel "$module" || { echo "guest: no module $module"; finish 1; }
done
mount -t tmpfs state /var/lib/nfs
mkdir -p /var/lib/nfs/rpc_pipefs /var/lib/nfs/v4recovery /var/lib/nfs/sm /var/lib/nfs/sm.bak
touch /var/lib/nfs/etab /var/lib/nfs/rmtab /var/lib/nfs/state
mount -t nfsd nfsd /proc/fs/nfsd
mount -t rpc_pipefs rpc /var/lib/nfs/rpc_pipefs
ip link set lo up
hostname server

mkdir /run/export
mount -t tmpfs export /run/export -o size=80%,nr_inodes=4m
half=$(awk "BEGIN {print $RTT_MS / 2}")
address=1
for client in a b; do
    ip netns add "$client"
    ip link add "to-$client" type veth peer name eth0 netns "$client"
    ip addr add "10.0.$address.1/24" dev "to-$client"
    ip link set "to-$client" up
    ip -n "$client" addr add "10.0.$address.2/24" dev eth0
    ip -n "$client" link set lo up
    ip -n "$client" link set eth0 up
    if [ "$RTT_MS" != 0 ] || [ -n "$MBIT" ]; then
        link="delay ${half}ms${MBIT:+ rate ${MBIT}mbit}"
        # shellcheck disable=SC2086 # several words
        tc qdisc add dev "to-$client" root netem $link
        # shellcheck disable=SC2086
        ip netns exec "$client" tc qdisc add dev eth0 root netem $link
    fi
    address=$((address + 1))
done
rpcbind -w || echo "guest: no rpcbind"
exportfs -o rw,no_root_squash,insecure,fsid=0,no_subtree_check '*:/run/export' || finish 1
rpc.nfsd 8 || { echo "guest: nfsd does not start"; finish 1; }
rpc.mountd || echo "guest: no mountd"

for spec in $(echo "$VERSIONS" | tr , ' '); do
    version=${spec%%+*}
    option=$(echo "$spec" | sed -n 's/^[^+]*+//p')
    place=/; [ "$version" = 3 ] && place=/run/export
    address=1
    for client in a b; do
        mkdir -p "/run/$client"
        unshare --uts sh -c "hostname client-$client; nsenter --net=/run/netns/$client \
            mount -t nfs -o vers=$version,hard,nolock,proto=tcp${option:+,$option} \
            10.0.$address.1:$place /run/$client" || { echo "guest: no mount"; finish 1; }
        address=$((address + 1))
    done
    echo "guest: NFS $spec: $(grep -c ' nfs' /proc/mounts) mounts"
    env PYTHONPATH="$SOURCE" PYTHONDONTWRITEBYTECODE=1 XDG_CACHE_HOME=/run/cache \
        "$PYTHON" "$SCRIPT" /run/a /run/b "$spec" "$PARTS" || { echo "guest: NFS $spec failed"; }
    umount /run/a /run/b
    rm -rf /run/export/*
done
finish 0
