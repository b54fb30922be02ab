# The head of every probe. $fence is set before it: a word that no output can guess. It is never exported and never an
# argument of a process, so that only this shell knows it.
# BURST_PROBE_ROOT goes before /sys, /proc, /etc and /dev in what is read: a rehearsal node has a tree of its own.
LC_ALL=C
export LC_ALL
root=${BURST_PROBE_ROOT:-}
export root
PATH=$PATH:/usr/sbin:/sbin:/usr/local/sbin:/usr/bin:/bin
export PATH

if timeout -k 1 9 true </dev/null >/dev/null 2>&1; then
    # What ignores TERM is killed. A process stuck in the kernel (state D) cannot be, and timeout waits for it for ever:
    # the outer one then kills the waiting one, and the probe goes on.
    limited() { timeout -s KILL $(($1 + 5)) timeout -k 2 "$1" sh -s; }
elif timeout -s KILL 9 true </dev/null >/dev/null 2>&1; then
    limited() { timeout -s KILL "$1" sh -s; } # of older busybox
else
    limited() { sh -s; } # the asking side gives up on the whole answer
fi

# Seconds since boot, or a dash: without starting a process, and without trust in the clock.
since_boot() { read -r now rest 2>/dev/null </proc/uptime || now=-; }

# section NAME SECONDS <<'END' ... END    runs the lines below in a shell of their own, with a time limit.
# With BURST_PROBE_SECTIONS, names with blanks between them, only those are answered.
section() {
    case " ${BURST_PROBE_SECTIONS:-$1} " in
        *" $1 "*) ;;
        *) return 0 ;;
    esac
    since_boot
    printf '\n%s begin %s %s\n' "$fence" "$1" "$now"
    limited "$2" 2>&1
    code=$?
    since_boot
    printf '\n%s end %s %s %s\n' "$fence" "$1" "$code" "$now"
}
