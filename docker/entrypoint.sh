#!/bin/sh
# Runs the command it is given in its own place, so that the signals of `docker stop` reach that command.
# A user id that the image does not know (docker run --user) has no home folder; it gets one in /tmp.
set -eu

if [ ! -w "${HOME:-/}" ]; then
    HOME=$(mktemp -d)
    export HOME
fi
exec "$@"
