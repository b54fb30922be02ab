# The GPUs of a node. Nothing here judges: what was seen goes out as it is, and a tool that failed says so by its exit code.

# Without persistence mode every call of nvidia-smi sets up each GPU anew: eight of them can take 20 seconds.
smi_limit=${BURST_SMI_LIMIT_S:-30}
smi_began=$(date +%s)

# All PCI devices are counted, so that "no NVIDIA device" and "no sysfs" stay two things.
section gpu.lspci 10 <<'END'
show() {
    value=
    [ -r "$device/$2" ] && read -r value 2>/dev/null <"$device/$2"
    printf '\t%s=%s' "$1" "$value"
}
base=$(cd -P "$root/" 2>/dev/null && pwd -P)
[ "$base" = / ] && base=
seen=0
for device in "$root"/sys/bus/pci/devices/*; do
    [ -r "$device/vendor" ] || continue
    seen=$((seen + 1))
    read -r vendor <"$device/vendor"
    [ "$vendor" = 0x10de ] || continue
    printf 'pci\t%s' "${device##*/}"
    show class class
    show numa numa_node
    place=$(cd -P "$device" 2>/dev/null && pwd -P)
    printf '\tpath=%s\n' "${place#"$base"}"
done
printf 'pci_devices\t%s\tend\n' "$seen"
END

# The table of supported clocks is most of the output and says nothing about health. An element may also open and close on
# one line (`N/A`): a range of sed would then run on into the next GPU.
section gpu.smi "$smi_limit" <<'END'
command -v nvidia-smi >/dev/null || exit 127
exec 4>&1
code=$({ { nvidia-smi -q -x 2>&1; echo "$?" >&3; } |
    sed -e '/<supported_clocks>.*<\/supported_clocks>/d' -e '/<supported_clocks>/,/<\/supported_clocks>/d' \
        -e '/<accounted_processes>.*<\/accounted_processes>/d' \
        -e '/<accounted_processes>/,/<\/accounted_processes>/d' >&4; } 3>&1)
exit "$code"
END

# What hangs once hangs again: with a stuck driver the other questions are not asked, and are missing in the answer.
if [ $(($(date +%s) - smi_began)) -lt "$smi_limit" ]; then
    section gpu.nvlink 20 <<'END'
command -v nvidia-smi >/dev/null || exit 127
nvidia-smi nvlink --status
END
fi

section gpu.fabric_manager 10 <<'END'
if [ -z "$root" ] && command -v systemctl >/dev/null; then
    printf 'unit\t%s\n' "$(systemctl is-active nvidia-fabricmanager 2>&1)"
fi
scanned=0
for comm in "$root"/proc/[0-9]*/comm; do
    read -r name 2>/dev/null <"$comm" || continue
    scanned=$((scanned + 1))
    # The kernel keeps 15 characters of a name.
    case $name in nv-fabricmanage*) comm=${comm%/comm} && printf 'process\t%s\n' "${comm##*/}" ;; esac
done
if [ -z "$root" ] && command -v nv-fabricmanager >/dev/null; then
    printf 'version\t%s\n' "$(nv-fabricmanager --version 2>&1 | head -n 1)"
fi
printf 'scanned\t%s\tend\n' "$scanned"
END

# A second look, seconds after the first: GPUs that are still in use, then owner and age of each process on them. One that
# /proc does not show belongs to another PID namespace.
if [ $(($(date +%s) - smi_began)) -lt "$smi_limit" ]; then
    section gpu.again 35 <<'END'
command -v nvidia-smi >/dev/null || exit 127
sleep "${BURST_SMI_PAUSE_S:-2}"
answer=$({ nvidia-smi -q -x 2>&1; printf '\n@@ended %s\n' "$?"; } |
    sed -n -e '/<mig_devices>.*<\/mig_devices>/d' -e '/<mig_devices>/,/<\/mig_devices>/d' \
        -e '/<processes *\/>/{p;d;}' -e '/<processes>.*<\/processes>/{p;d;}' -e '/^@@ended /p' \
        -e '/<?xml/p; /<\/\{0,1\}nvidia_smi_log>/p; /<gpu id=/p; /<\/gpu>/p; /<uuid>/p; /<attached_gpus>/p' \
        -e '/<fb_memory_usage>/,/<\/fb_memory_usage>/p' -e '/<processes>/,/<\/processes>/p')
printf '%s\n' "${answer%@@ended *}"
hertz=$(getconf CLK_TCK 2>/dev/null || echo 100)
uptime=
[ -r "$root/proc/uptime" ] && read -r uptime _ <"$root/proc/uptime"
for pid in $(printf '%s\n' "$answer" | sed -n 's/.*<pid>\([0-9][0-9]*\)<\/pid>.*/\1/p' | sort -u); do
    { [ -r "$root/proc/$pid/stat" ] && [ -n "$uptime" ]; } || continue
    read -r stat <"$root/proc/$pid/stat"
    # The command, in brackets, may hold blanks and brackets itself; the start is the 20th word after it.
    start=$(printf '%s\n' "${stat##*) }" | cut -d ' ' -f 20)
    owner=$(ls -ld "$root/proc/$pid" | tr -s ' ' | cut -d ' ' -f 3)
    printf 'owner %s %s %s\n' "$pid" "$owner" "$((${uptime%.*} - start / hertz))"
done
exit "${answer##*@@ended }"
END
fi
