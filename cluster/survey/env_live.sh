# What is set on the node now. Only names of the families NCCL, GLOO and TORCH leave it: an environment holds secrets.

section env_live.session 10 <<'END'
awk 'BEGIN {
    for (name in ENVIRON) {
        if (name !~ /^((NCCL|GLOO|TORCH)_[A-Za-z0-9_]*|OMP_NUM_THREADS)$/) continue
        value = substr(ENVIRON[name], 1, 4096)
        gsub(/\n/, "\\n", value)
        printf "set\t%s=%s\n", name, value
    }
}'
END

section env_live.files 10 <<'END'
for file in "$root/etc/nccl.conf" "${NCCL_CONF_FILE:-$HOME/.nccl.conf}"; do
    [ -e "$file" ] || continue
    case $file in
        "$root/etc/nccl.conf") name=/etc/nccl.conf ;;
        "$HOME/.nccl.conf") name='~/.nccl.conf' ;;
        *) name=$file ;;
    esac
    printf 'file\t%s\n' "$name"
    lines=$(grep -E '^[[:space:]]*((NCCL|GLOO|TORCH)_[A-Za-z0-9_]*|OMP_NUM_THREADS)[[:space:]]*=' "$file")
    [ $? -le 1 ] || printf 'unreadable\n'
    printf '%s\n' "$lines" | head -n 200 | cut -c -4096 | sed -n "s/^[[:space:]]*\([^[:space:]]\)/set$(printf '\t')\1/p"
done
END

# Processes of runs of burst, of this network namespace only: a rehearsal node shares its processes with the machine.
section env_live.processes 30 <<'END'
here=$(readlink /proc/self/ns/net)
found=$(grep -l BURST_RUN_ID= /proc/[0-9]*/environ 2>/dev/null)
[ "$(printf '%s\n' "$found" | wc -l)" -le 2048 ] || echo unreadable
printf '%s\n' "$found" | head -n 2048 | while read -r path; do
    [ -n "$path" ] || continue
    process=${path%/environ}
    [ "$(readlink "$process/ns/net" 2>/dev/null)" = "$here" ] || continue
    printf 'process\t%s\n' "${process#/proc/}"
    tr '\n\000' ' \n' <"$path" 2>/dev/null |
        grep -E '^((NCCL|GLOO|TORCH)_[A-Za-z0-9_]*|OMP_NUM_THREADS|BURST_RUN_ID|RANK)=' |
        cut -c -4096 | sed "s/^/set$(printf '\t')/"
done
exit 0
END
