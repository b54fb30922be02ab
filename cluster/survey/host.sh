# The host itself: disks, limits, memory, processes, software, container engine.
#
# Settings come as exported variables, each may be unset: BURST_RUNTIME (bare or docker), BURST_ENGINE (the engine's
# command line, its words split at blanks), BURST_IMAGE (NAME:TAG), BURST_SHARED_FOLDER.
# A file is read below $root when the rehearsal tree has it, else where it really is.

section host.limits 5 <<'END'
# Of this very session: what a command over SSH may use, which is what a launch gets.
# The adapters come first: an answer that was cut off does not look as if there were none.
for device in "$root"/sys/class/infiniband/*; do
    [ -e "$device" ] && printf 'rdma %s\n' "${device##*/}"
done
# In KiB, as `ulimit -l` has it; from /proc, where a rehearsal tree can say what a testbed cannot be.
limits=$root/proc/self/limits
[ -r "$limits" ] || limits=/proc/self/limits
printf 'nofile_soft %s\n' "$(ulimit -Sn)"
printf 'nofile_hard %s\n' "$(ulimit -Hn)"
printf 'memlock %s\n' "$(awk '/^Max locked memory/ { print ($4 == "unlimited") ? $4 : int($4 / 1024) }' "$limits")"
exit 0
END

section host.disk 10 <<'END'
command -v stat >/dev/null 2>&1 || exit 127
filesystem() { stat -f -c "$1 %S %b %a %c %d %T" "$2"; }
filesystem root /
filesystem tmp "${TMPDIR:-/tmp}"
shm=/dev/shm
[ -d "$root$shm" ] && shm=$root$shm
if [ -d "$shm" ]; then filesystem shm "$shm"; else echo 'absent shm'; fi
exit 0
END

section host.shared 10 <<'END'
# A dead file server hangs whoever asks: that is why this is a section of its own.
[ -n "${BURST_SHARED_FOLDER:-}" ] || { echo unset; exit 0; }
[ -d "$BURST_SHARED_FOLDER" ] || { ls -ld -- "$BURST_SHARED_FOLDER"; echo absent; exit 0; }
command -v stat >/dev/null 2>&1 || exit 127
stat -f -c 'shared %S %b %a %c %d %T' -- "$BURST_SHARED_FOLDER"
END

section host.memory 5 <<'END'
file=$root/proc/meminfo
[ -e "$file" ] || file=/proc/meminfo
while read -r key value unit; do
    case $key in MemTotal:|MemAvailable:|SwapTotal:|SwapFree:) printf '%s %s %s\n' "$key" "$value" "$unit" ;; esac
done <"$file"
END

section host.runs 20 <<'END'
# Processes with BURST_RUN_ID in their environment. Only root may read the environment of other users' processes.
# A tool that is there and broken must not look like a node without runs.
[ "$(printf 'a\0' | tr '\n\0' ' b' | awk '/^a/')" = ab ] || exit 127
proc=$root/proc
[ -r "$proc/1/stat" ] || proc=/proc
read -r uptime rest <"$proc/uptime" || read -r uptime rest </proc/uptime
printf 'uptime %s\nticks %s\nuser %s\n' "$uptime" "$(getconf CLK_TCK 2>/dev/null || echo 100)" "$(id -u)"
cd "$proc" || exit 1
readable=0
unreadable=0
for folder in [0-9]*; do
    if [ -r "$folder/environ" ]; then readable=$((readable + 1)); else unreadable=$((unreadable + 1)); fi
done
printf 'read %s\nunread %s\n' "$readable" "$unreadable"
# One grep finds the candidates among thousands of processes, if it is one that looks beyond a NUL.
if printf 'a\0BURST_RUN_ID=' | grep -q BURST_RUN_ID= && command -v xargs >/dev/null 2>&1; then
    candidates=$(printf '%s\n' [0-9]*/environ | xargs grep -ls BURST_RUN_ID=)
else
    candidates=$(printf '%s\n' [0-9]*/environ)
fi
owners=' '
for file in $candidates; do
    folder=${file%/environ}
    # Threads of the kernel have no environment, and processes end meanwhile: that is no error.
    run=$({ tr '\n\0' ' \n' <"$file"; } 2>/dev/null | awk '/^BURST_RUN_ID=./ { print substr($0, 14, 100); exit }')
    [ -n "$run" ] || continue
    line=$(awk -v pid="$folder" 'BEGIN {
        file = pid "/stat"; text = ""
        while ((getline line < file) > 0) text = text " " line
        last = 0
        for (at = index(text, ")"); at > 0; at = index(substr(text, last + 1), ")")) last += at
        name = substr(text, index(text, "(") + 1, last - index(text, "(") - 1)
        split(substr(text, last + 2), field, " ")
        uid = "?"; file = pid "/status"
        while ((getline line < file) > 0) if (line ~ /^Uid:/) { split(line, ids, /[ \t]+/); uid = ids[2] }
        if (field[1] != "Z" && last > 0) print pid, uid, field[20], name
    }')
    [ -n "$line" ] || continue
    printf 'run %s\nid %s %s\n' "$line" "${line%% *}" "$run"
    owner=${line#* }
    owner=${owner%% *}
    case $owners in
        *" $owner "*) ;;
        *)
            owners="$owners$owner "
            entry=$(getent passwd "$owner" 2>/dev/null)
            printf 'owner %s %s\n' "$owner" "${entry%%:*}"
            ;;
    esac
done
echo end
END

section host.software 15 <<'END'
printf 'runtime %s\n' "${BURST_RUNTIME:-bare}"
python=${BURST_PYTHON:-python3}
case $python in "~/"*) python=$HOME/${python#"~/"} ;; esac
if command -v "$python" >/dev/null 2>&1; then
    # The versions are in the packages' metadata: importing torch would take seconds.
    "$python" - <<'PYTHON' 2>/dev/null || echo 'failed python'
import sys
print("python %d.%d.%d" % sys.version_info[:3], flush=True)
from importlib.metadata import distributions
found = {}
for one in distributions():
    name = (one.metadata["Name"] or "").lower().replace("_", "-")
    if name == "torch" or name.startswith("nvidia-nccl-cu"):
        found.setdefault(name, one.version)
for name in sorted(found):
    print("package %s %s" % (name, found[name]))
print("packages read")
PYTHON
else
    echo 'absent python'
fi
exit 0
END

section host.nccl 5 <<'END'
# Nothing but NCCL_* is read out: other variables and lines may hold secrets.
show() {
    if [ ! -e "$2" ]; then printf 'absent %s\n' "$1"; return; fi
    [ -r "$2" ] || { printf 'unreadable %s\n' "$1"; return; }
    while read -r line || [ -n "$line" ]; do
        case $line in NCCL_*=*) printf '%s %.300s\n' "$1" "$line" ;; esac
    done <"$2"
}
file=$root/etc/nccl.conf
[ -e "$file" ] || file=/etc/nccl.conf
show system "$file"
show user "${NCCL_CONF_FILE:-${HOME:-/}/.nccl.conf}"
env | while read -r line; do
    case $line in NCCL_*=*) printf 'session %.300s\n' "$line" ;; esac
done
echo end
END

section host.docker 20 <<'END'
set -f
engine=${BURST_ENGINE:-docker}
for hook in nvidia-container-runtime-hook nvidia-ctk; do
    command -v "$hook" >/dev/null 2>&1 && printf 'hook %s\n' "$hook"
done
set +f
for file in "$root"/etc/cdi/*nvidia* /var/run/cdi/*nvidia*; do
    [ -e "$file" ] && printf 'cdi %s\n' "${file##*/}"
done
{ [ -e "$root/dev/nvidiactl" ] || [ -e "$root/proc/driver/nvidia/version" ] || [ -e /proc/driver/nvidia/version ]; } && echo gpus
set -f
command -v "${engine%% *}" >/dev/null 2>&1 || exit 127
# A dead daemon is no reason for some versions to exit with anything but 0: only a server version counts.
# Field by field: the whole answer may hold the password of a proxy.
$engine info --format 'ServerVersion {{json .ServerVersion}}
DockerRootDir {{json .DockerRootDir}}
Driver {{json .Driver}}
Runtimes {{json .Runtimes}}' || exit 1
folder=$($engine info --format '{{.DockerRootDir}}') && stat -f -c 'docker %S %b %a %c %d %T' -- "$folder"
exit 0
END

section host.image 20 <<'END'
set -f
engine=${BURST_ENGINE:-docker}
[ -n "${BURST_IMAGE:-}" ] || { echo unset; exit 0; }
command -v "${engine%% *}" >/dev/null 2>&1 || exit 127
$engine image inspect --format 'image {{json .Architecture}} {{json .Os}} {{json .Created}} {{json .RootFS.Layers}}
size {{json .Size}}' -- "$BURST_IMAGE"
END
