# head.sh HOSTS COMMAND...    runs the command under the name `head`, by which the nodes of a testbed know this machine;
# it is started in mount and UTS namespaces of its own.
set -eu
hosts=$1
shift
hostname head
mount --bind "$hosts" /etc/hosts
# A copy of another namespace's mount would keep that namespace alive after its end.
umount -l /run/netns 2>/dev/null || :
exec "$@"
