# Group net: interfaces with their addresses, routes, and what /sys tells about each interface.
#
# The first line of net.links and net.route names the format of what follows: json, or proc where no ip knows -json
# (older iproute2, busybox, no ip at all).

section net.links 10 <<'END'
# Nothing but a JSON list is believed: an ip that does not know -json says so on stdout or with exit code 0, too.
if answer=$(ip -json -details addr show 2>/dev/null) && case $answer in '['*) ;; *) false ;; esac then
    printf 'json\n%s\n' "$answer"
    exit 0
fi
[ -r "$root/proc/net/fib_trie" ] || exit 127
printf 'proc\n'
# "32 host LOCAL" follows the address of this node that it is about.
while read -r first second third rest; do
    case $first in
        '|--') address=$second ;;
        /32) if [ "$second $third" = 'host LOCAL' ]; then printf 'local\t%s\n' "$address"; fi ;;
    esac
done <"$root/proc/net/fib_trie" || exit 1
printf 'end\n'
END

section net.route 10 <<'END'
if answer=$(ip -json route show 2>/dev/null) && case $answer in '['*) ;; *) false ;; esac then
    printf 'json\n%s\n' "$answer"
    exit 0
fi
[ -r "$root/proc/net/route" ] || exit 127
printf 'proc\n'
cat "$root/proc/net/route" || exit 1
printf 'end\n'
END

section net.sysfs 10 <<'END'
tab=$(printf '\t')
lines=0
first() { value=; { IFS= read -r value <"$1"; } 2>/dev/null; }
put() {
    # No value of these holds a tab; one that does is no answer.
    case $2 in *"$tab"*) return 0 ;; esac
    line="$line$tab$1=$2"
}
put_file() { first "$2"; put "$1" "$value"; }
base=$(cd -P "$root/" 2>/dev/null && pwd -P)
[ "$base" = / ] && base=
for folder in "$root/sys/class/net/"*; do
    [ -d "$folder" ] || continue
    line="interface${tab}name=${folder##*/}"
    for name in operstate carrier mtu type; do put_file "$name" "$folder/$name"; done
    place=$(cd -P "$folder/device" 2>/dev/null && pwd -P)
    put path "${place#"$base"}"
    kind=
    [ -d "$folder/bridge" ] && kind=bridge
    [ -d "$folder/bonding" ] && kind=bond
    [ -e "$folder/tun_flags" ] && kind=tun
    put kind "$kind"
    if [ -e "$folder/master" ]; then
        place=$(cd -P "$folder/master" 2>/dev/null && pwd -P)
        put master "${place##*/}"
    fi
    printf '%s\n' "$line"
    lines=$((lines + 1))
done
printf 'end\t%s\n' "$lines"
END
