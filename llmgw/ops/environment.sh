#!/bin/sh
# Make .venv hold exactly what a lock file names (its hashes checked), and llmgw itself. Usage: environment.sh LOCK
# Runs again safely; says in one sentence what is missing when it cannot go on.
set -eu
lock=$1

stop() {
    echo "llmgw: $1" >&2
    exit 2
}

find_python() {
    for name in "${PYTHON:-python3}" python3.13 python3.12 python3.11; do
        if command -v "$name" >/dev/null 2>&1 &&
            "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    found=$(python3 --version 2>&1 || true)
    stop "Python 3.11 or newer is needed; found: ${found:-none}. Install it, or name one: make up PYTHON=/path/to/python3.12"
}

apt_install() {
    command -v apt-get >/dev/null 2>&1 || stop "$1 is missing and this is no Debian; install it with your package manager."
    [ "$(id -u)" = 0 ] || stop "$1 is missing. As root: apt-get install -y $1"
    apt-get install -y -qq "$1" >/dev/null 2>&1 || { apt-get update -qq && apt-get install -y -qq "$1" >/dev/null; } ||
        stop "apt-get could not install $1; its message is above."
}

# An activated .venv is the very thing that is made here, so it must not be what it is made with.
PATH=$(printf '%s' "$PATH" | tr ':' '\n' | grep -vxF "$(pwd)/.venv/bin" | paste -sd: -)
export PATH

[ -w . ] || stop "$(pwd) is not writable by you; clone llmgw somewhere that is."
python=$(find_python)
if ! .venv/bin/python -c '' 2>/dev/null || ! { .venv/bin/uv --version || .venv/bin/python -m pip --version; } >/dev/null 2>&1; then
    rm -rf .venv
    if ! "$python" -m venv .venv >/dev/null 2>&1; then
        rm -rf .venv
        apt_install python3-venv
        "$python" -m venv .venv || stop "$python cannot make a virtual environment in $(pwd)/.venv; its message is above."
    fi
fi

# A private network's own authority is in the system's store, which a bare Debian does not have.
[ -e /etc/ssl/certs/ca-certificates.crt ] && export UV_SYSTEM_CERTS="${UV_SYSTEM_CERTS:-true}"

want_uv=$(sed -n 's/^uv==\([^ ]*\).*/\1/p' requirements.lock)
if [ "$(.venv/bin/uv --version 2>/dev/null | cut -d' ' -f2)" != "$want_uv" ]; then
    echo "Installing uv $want_uv into .venv"
    awk '/^uv==/ {on=1} on && /^[^ ]/ && !/^uv==/ {exit} on' requirements.lock >.venv/uv.txt
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r .venv/uv.txt ||
        stop "uv could not be installed from PyPI; the reason is above. Check network and disk, then run the same command again."
fi
echo "Installing what $lock names into .venv"
.venv/bin/uv pip install --quiet --python .venv/bin/python --require-hashes -r "$lock" ||
    stop "packages could not be installed; the reason is above. Check network and disk, then run the same command again."
.venv/bin/uv pip install --quiet --python .venv/bin/python --no-deps --no-build-isolation --editable . ||
    stop "llmgw could not be installed into .venv; the reason is above."
