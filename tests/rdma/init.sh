#!/bin/busybox sh
# The guest's first process. Its root is the host's, read-only, under a file system in memory that takes what is
# written; the host's folder for this run is at /run/job, and has the command. Each port carries one stream.
B=/bin/busybox
fail() { echo "test-rdma: $*"; $B poweroff -f; }
$B mount -t proc proc /proc; $B mount -t sysfs sys /sys; $B mount -t devtmpfs dev /dev
exec </dev/null >/dev/console 2>&1
while read -r module; do $B insmod "/modules/$module.ko" || echo "test-rdma: $module did not load"; done </modules/order
for port in /sys/class/virtio-ports/*; do read -r name <"$port/name"; eval "$name=/dev/${port##*/}"; done

OPTIONS=trans=virtio,version=9p2000.L,msize=262144
$B mount -t 9p -o ro,cache=loose,$OPTIONS host /lower || fail "the host's files cannot be mounted"
$B mount -t tmpfs -o size=75% over /over; $B mkdir /over/upper /over/work
$B mount -t overlay -o lowerdir=/lower,upperdir=/over/upper,workdir=/over/work overlay /root || fail "no overlay"
$B mount -t proc proc /root/proc; $B mount -t sysfs sys /root/sys; $B mount -t devtmpfs dev /root/dev
$B mkdir -p /root/dev/pts /root/dev/shm
$B mount -t devpts pts /root/dev/pts; $B mount -t tmpfs shm /root/dev/shm; $B mount -t tmpfs run /root/run
$B mkdir -p /root/run/job /root/run/tmp; $B chmod 1777 /root/run/tmp /root/dev/shm
$B ln -sf /proc/self/fd /root/dev/fd
$B mount -t 9p -o ro,cache=none,$OPTIONS job /root/run/job || fail "the run's folder cannot be mounted"
if [ -e /root/run/job/writable ]; then
    $B mount -t 9p -o rw,cache=mmap,$OPTIONS writable "/root$($B cat /root/run/job/writable)" || fail "nothing to write to"
fi

ulimit -l unlimited; ulimit -Hn 65536
$B mkfifo /over/out /over/err
$B cat /over/out >"$out" & outward=$!
$B cat /over/err >"$err" & inward=$!
exec 3>"$status"
$B chroot /root /bin/bash /run/job/command.sh </dev/null >/over/out 2>/over/err  # it says "up" when all is set up
code=$?
# What the command left behind may hold the pipes open: it does not hold up the end.
( $B sleep 3; $B kill $outward $inward ) >/dev/null 2>&1 &
wait $outward $inward
$B sync
echo "$code" >&3
$B poweroff -f
