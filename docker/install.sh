#!/bin/sh
# One step of the Dockerfile: install.sh torch DEVICE CPU_INDEX | packages | code
#
# Files of Python lie in three folders, one per layer; burst.pth in the first makes the interpreter see the others.
# Wheels in /build/wheels make it an installation without network: pip looks there and nowhere else.
set -eu

top=/opt/burst
build=/build
python=$top/venv/bin/python

step=$1

install() {
    if ls $build/wheels/*.whl >/dev/null 2>&1; then
        set -- --no-index --find-links $build/wheels "$@"
    fi
    $python -m pip install --no-cache-dir --disable-pip-version-check --root-user-action=ignore \
        -c $build/constraints.txt "$@"
}

case $step in
torch)
    python3 -m venv $top/venv
    case $2 in
    cuda) install torch ;;
    cpu) install --extra-index-url "$3" torch ;;
    *) echo "DEVICE=$2: expected cuda or cpu" >&2 && exit 2 ;;
    esac
    site=$($python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    printf '%s\n' $top/packages $top/code >"$site/burst.pth"
    ;;
packages)
    $python $build/requirements.py $build/pyproject.toml torch parquet tensorboard >$build/requirements.txt
    install --target $top/packages -r $build/requirements.txt
    ;;
code)
    rm -rf $build/src/docker/wheels # they would become a part of the package
    install --target $top/code --no-deps $build/src
    ;;
*)
    echo "install.sh: no step $step" >&2
    exit 2
    ;;
esac
