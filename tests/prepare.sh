#!/bin/sh
# Have what tests and benchmarks use besides Python packages. Usage: prepare.sh DEBIAN-PACKAGE...
# Installs what is missing when root; otherwise says what to install.
set -eu
PATH=$PATH:/usr/sbin
missing=""
for package in "$@"; do
    case $package in
    nodejs) command -v node >/dev/null 2>&1 || missing="$missing $package" ;;
    postgresql) [ -n "$(ls /usr/lib/postgresql/*/bin/initdb 2>/dev/null)" ] || missing="$missing $package" ;;
    python3-dev) ls "$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" >/dev/null 2>&1 || missing="$missing $package" ;;
    *) command -v "${package%-light}" >/dev/null 2>&1 || missing="$missing $package" ;;
    esac
done
[ -z "$missing" ] && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "llmgw: this needs$missing. On Debian, as root: apt-get install -y$missing" >&2
    exit 2
fi
echo "Installing$missing"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# shellcheck disable=SC2086 # a list of package names
apt-get install -y -qq --no-install-recommends $missing >/dev/null
