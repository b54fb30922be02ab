# hold.sh NODE FOLDER DISK    makes a node of the mount and UTS namespaces that it is started in, in the node's network
# namespace. DISK: a folder to keep in memory; empty: none.
set -eu
node=$1 folder=$2 disk=$3
hostname "$node"
for file in hosts hostname passwd shadow resolv.conf; do
    if [ -e "/etc/$file" ]; then mount --bind "$folder/etc/$file" "/etc/$file"; fi
done
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
