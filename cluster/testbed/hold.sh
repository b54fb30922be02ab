# hold.sh NODE FOLDER DISK    makes a node of the mount and UTS namespaces that it is started in, in the node's network
# namespace. DISK: a folder to keep in memory; empty: none.
set -eu
node=$1 folder=$2 disk=$3
hostname "$node"
# The whole of /etc, with the node's own files in it. A mount on one file would be gone as soon as a package replaces that
# file on this machine: the kernel takes a mount away, in every namespace, with the name that it is on. Where the folder
# is on an overlay itself, a second one cannot be written to.
mkdir -p "$folder/etc.work"
(cd "$folder" && mount -t overlay overlay -o lowerdir=/etc,upperdir=etc,workdir=etc.work /etc 2>/dev/null) ||
    (cd "$folder" && mount -t overlay overlay -o lowerdir=etc:/etc /etc)
# A copy of another namespace's mount would keep that namespace alive after its end.
umount -l /run/netns 2>/dev/null || :
# The /sys of this network namespace, with the control groups put back: a fresh /sys lacks them and Docker needs them.
mkdir -p "$folder/cgroup"
if [ -d /sys/fs/cgroup ]; then mount --rbind /sys/fs/cgroup "$folder/cgroup"; fi
mount -t sysfs sysfs /sys
if [ -d /sys/fs/cgroup ]; then
    mount --rbind "$folder/cgroup" /sys/fs/cgroup
    umount -l "$folder/cgroup"
fi
if [ -n "$disk" ]; then
    mkdir -p "$disk"
    mount -t tmpfs -o mode=0711 tmpfs "$disk"
fi
