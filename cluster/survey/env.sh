# What the environment of ranks depends on beside adapters, interfaces and GPUs.

section env.cores 10 <<'END'
nproc 2>/dev/null || getconf _NPROCESSORS_ONLN
END

section env.routes 10 <<'END'
ip -4 route show table all
END

# Servers of mounted network file systems, and the interface that leads to each.
section env.storage 20 <<'END'
[ -r "$root/proc/mounts" ] || exit 0
count=0
while read -r source folder type options rest; do
    case $type in
        nfs | nfs4 | lustre | ceph | cifs | smb3 | beegfs* | glusterfs | fuse.glusterfs) ;;
        *) continue ;;
    esac
    [ "$count" -lt 32 ] || break
    count=$((count + 1))
    listed=",$options,"
    address=${listed##*,addr=}
    if [ "$address" = "$listed" ]; then
        address=${source#//}
        address=${address%%[:@/,]*}
    else
        address=${address%%,*}
    fi
    route=$(ip -o -4 route get "$address" 2>/dev/null | head -n 1)
    printf 'storage\t%s\t%s\t%s\n' "$folder" "$address" "$route"
done <"$root/proc/mounts"
END

# What lies below bonds, bridges and VLANs.
section env.lower 10 <<'END'
for link in "$root"/sys/class/net/*/lower_*; do
    [ -e "$link" ] || [ -L "$link" ] || continue
    upper=${link%/*}
    printf 'lower\t%s\t%s\n' "${upper##*/}" "${link##*/lower_}"
done
END
