#!/bin/sh
# What the tests use besides Python packages: Redis, PostgreSQL and Chromium from Debian. Installs what is missing
# when root; otherwise says what to install.
set -eu
missing=""
command -v redis-server >/dev/null 2>&1 || missing="$missing redis-server"
[ -n "$(ls /usr/lib/postgresql/*/bin/initdb 2>/dev/null)" ] || missing="$missing postgresql"
command -v chromium >/dev/null 2>&1 || missing="$missing chromium"
[ -z "$missing" ] && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "llmgw: the tests need$missing. On Debian, as root: apt-get install -y$missing" >&2
    exit 2
fi
echo "Installing$missing"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# shellcheck disable=SC2086 # a list of package names
apt-get install -y -qq --no-install-recommends $missing >/dev/null
