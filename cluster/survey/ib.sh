# Group ib: adapters from /sys, their counters twice, and what GPUDirect needs.
#
# One line per thing: a word, then KEY=VALUE fields, all separated by tabs. In a value % is %25 and a tab is %09.
# `end` with the number of lines before it comes last: an answer without it is not whole.

section ib.ports 20 <<'END'
tab=$(printf '\t')
lines=0
# first FILE: its first line in $value; empty when it cannot be read.
first() { value=; { IFS= read -r value <"$1"; } 2>/dev/null; }
# put KEY VALUE: one more field of $line.
put() {
    rest=$2 safe=
    while :; do
        case $rest in
            *[%"$tab"]*) ;;
            *) break ;;
        esac
        head=${rest%%[%"$tab"]*}
        rest=${rest#"$head"}
        case $rest in
            %*) safe=$safe$head%25 ;;
            *) safe=$safe$head%09 ;;
        esac
        rest=${rest#?}
    done
    line="$line$tab$1=$safe$rest"
}
put_file() { first "$2"; put "$1" "$value"; }
show() { printf '%s\n' "$line"; lines=$((lines + 1)); }
base=$(cd -P "$root/" 2>/dev/null && pwd -P)
[ "$base" = / ] && base=
routes=$root/proc/net/route
[ -r "$routes" ] || routes=/dev/null
# put_path KEY FOLDER: where a link to a device leads, seen from the node's own root.
put_path() { place=$(cd -P "$2" 2>/dev/null && pwd -P); put "$1" "${place#"$base"}"; }

put_device() {
    put_path path "$device/device"
    put_file numa_node "$device/device/numa_node"
    put_file width "$device/device/current_link_width"
    put_file width_max "$device/device/max_link_width"
    put_file speed "$device/device/current_link_speed"
    put_file speed_max "$device/device/max_link_speed"
    if [ -e "$device/device/physfn" ]; then put physfn 1; else put physfn 0; fi
}

# The interface of port $1: what its first GID is tied to, else the one that counts as that port of the device.
put_netdev() {
    first "$device/ports/$1/gid_attrs/ndevs/0"
    netdev=$value
    for folder in "$device/device/net/"*; do
        [ -z "$netdev" ] || break
        # A partition of InfiniBand (ib0.8001) has a parent; the device's own interface has none.
        { [ -d "$folder" ] && [ ! -e "$folder/parent" ]; } || continue
        first "$folder/dev_port"
        [ "${value:-0}" = "$(($1 - 1))" ] && netdev=${folder##*/}
    done
    [ -n "$netdev" ] || return 0
    put netdev "$netdev"
    put_file netdev_state "$root/sys/class/net/$netdev/operstate"
    put_file netdev_mtu "$root/sys/class/net/$netdev/mtu"
    if [ -e "$root/sys/class/net/$netdev/master" ] || [ -e "$root/sys/class/net/$netdev/bonding" ]; then
        put bonded 1
    fi
    if has_default_route "$netdev"; then put default_route 1; fi
}

# has_default_route NETDEV: also when what it is a part of (a bond, a bridge) has it.
has_default_route() {
    place=$(cd -P "$root/sys/class/net/$1/master" 2>/dev/null && pwd -P)
    while read -r name destination rest; do
        [ "$destination" = 00000000 ] || continue
        case $name in "$1" | "${place##*/}") return 0 ;; esac
    done <"$routes"
    return 1
}

put_gids() {
    index=0
    while [ "$index" -lt 32 ] && [ -e "$1/gids/$index" ]; do
        first "$1/gids/$index"
        address=$value
        case $address in
            '' | 0000:0000:0000:0000:0000:0000:0000:0000) ;;
            *)
                # Reading the type of an unused entry is an error of the kernel's: no answer.
                first "$1/gid_attrs/types/$index"
                put "gid.$index" "$address $value"
                ;;
        esac
        index=$((index + 1))
    done
}

for device in "$root/sys/class/infiniband/"*; do
    [ -e "$device" ] || [ -L "$device" ] || continue
    found=0
    for port in "$device/ports/"*; do
        [ -d "$port" ] || continue
        found=1
        line=port
        put dev "${device##*/}"
        put port "${port##*/}"
        for name in state phys_state rate link_layer; do put_file "$name" "$port/$name"; done
        put_device
        put_netdev "${port##*/}"
        put_gids "$port"
        show
    done
    if [ "$found" = 0 ]; then
        line=portless
        put dev "${device##*/}"
        show
    fi
done

for device in "$root/sys/bus/pci/devices/"*; do
    first "$device/class"
    class=$value
    case $class in 0x0207* | 0x03*) ;; *) continue ;; esac
    first "$device/vendor"
    case $class,$value in
        0x0207*,*)
            # An InfiniBand adapter; without this folder no driver offers it.
            [ -d "$device/infiniband" ] && continue
            line=driverless
            ;;
        *,0x10de) line=gpu ;;
        *) continue ;;
    esac
    put_path path "$device"
    show
done
printf 'end\t%s\n' "$lines"
END

section ib.counters 30 <<'END'
tab=$(printf '\t')
lines=0
first() { value=; { IFS= read -r value <"$1"; } 2>/dev/null; }
sample() {
    for port in "$root/sys/class/infiniband/"*/ports/*; do
        [ -d "$port" ] || continue
        device=${port%/ports/*}
        line="sample$1${tab}dev=${device##*/}${tab}port=${port##*/}"
        count=0
        for file in "$port/counters/"* "$port/hw_counters/"*; do
            [ -f "$file" ] || continue
            count=$((count + 1))
            [ "$count" -le 120 ] || break
            # A rehearsal tree may hold what has grown meanwhile in a second tree beside sys.
            later=$root/sys-second/${file#"$root/sys/"}
            [ "$1" = 2 ] && [ -n "$root" ] && [ -f "$later" ] && file=$later
            first "$file"
            case $value in
                '' | *[!0-9]*) continue ;;
            esac
            line="$line$tab${file##*/}=$value"
        done
        printf '%s\n' "$line"
        lines=$((lines + 1))
    done
}
sample 1
sleep 1
sample 2
printf 'end\t%s\n' "$lines"
END

section ib.gpudirect 15 <<'END'
for file in sys/module/nvidia_peermem/version sys/kernel/mm/memory_peers/nv_mem/version \
    sys/kernel/mm/memory_peers/nv_mem_nc/version sys/module/nvidia; do
    if [ -e "$root/$file" ]; then answer=yes; else answer=no; fi
    printf 'exists\t/%s\t%s\n' "$file" "$answer"
done
# Only the open kernel modules of NVIDIA export DMA-BUF; its first line names them.
driver=
[ -r "$root/proc/driver/nvidia/version" ] && IFS= read -r driver <"$root/proc/driver/nvidia/version"
printf 'driver\t%s\n' "$driver"
printf 'kernel\t%s\n' "$(uname -r)"
grep -q ' ib_umem_dmabuf_get' "$root/proc/kallsyms" 2>/dev/null
case $? in
    0) answer=yes ;;
    1) answer=no ;;
    *) answer=unreadable ;;
esac
printf 'dmabuf\t%s\n' "$answer"
printf 'end\n'
END
