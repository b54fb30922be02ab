# What the drivers of GPUs and adapters wrote since boot. The journal comes first, for the kernel's own buffer forgets. A
# log without any line is no log: its reader may not see it.
#
# Lines of NVIDIA's drivers come one per kind and device with how often it came, `seen`: a flood of one hides no other.
# Those of adapters come as they are, the last 2000, `line`. `log` comes last.
section kernel.log 20 <<'END'
pick() {
    awk -v reader="$1" '
        BEGIN { code = 1 }
        # A pipe forgets the exit code of the reader, and then no permission looks like no trouble.
        /^@@ended [0-9]+$/ { code = $2; next }
        /^(-- |Hint: |No journal files)/ || /^ *$/ { next }
        { lines++ }
        /Linux version [0-9]/ { boot = 1 }
        /mlx[45]|infiniband|PCIe bandwidth/ { kept[found++ % 2000] = $0 }
        /NVRM|nvidia-nvswitch|fallen off the bus/ {
            kind = $0
            if (match($0, /S?Xid \([^)]*\): *[0-9]+/)) kind = substr($0, RSTART, RLENGTH)
            else if (kinds[""]++ >= 200) next
            else { sub(/^.*(NVRM|nvidia-nvswitch)/, "", kind); gsub(/[0-9]+/, "", kind) }
            if (!(kind in count)) order[++total] = kind
            count[kind]++
            last[kind] = $0
        }
        END {
            if (code != 0 || lines == 0) { print reader ": exit code " code ", " lines + 0 " lines"; exit 1 }
            for (i = 1; i <= total; i++) printf "seen\t%s\t%s\n", count[order[i]], last[order[i]]
            for (i = (found > 2000 ? found - 2000 : 0); i < found; i++) printf "line\t%s\n", kept[i % 2000]
            printf "log\t%s\t%s\t%s\n", reader, lines, boot ? "since boot" : "cut"
        }'
}
uptime=
[ -r "$root/proc/uptime" ] && read -r uptime rest <"$root/proc/uptime"
printf 'uptime\t%s\n' "$uptime"
if [ -n "$root" ]; then
    { cat "$root"/var/log/kernel-*.log 2>&1; printf '\n@@ended %s\n' "$?"; } | pick log
    exit
fi
if command -v journalctl >/dev/null; then
    { journalctl -k -b -q --no-pager -o short-monotonic 2>&1; printf '\n@@ended %s\n' "$?"; } | pick journalctl && exit
fi
{ dmesg 2>&1; printf '\n@@ended %s\n' "$?"; } | pick dmesg && exit
dmesg 2>&1 >/dev/null
exit 1
END
