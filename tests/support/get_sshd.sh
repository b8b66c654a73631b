#!/bin/sh
# Get an OpenSSH server for tests/support/sshd.py, where none is installed: `get_sshd.sh VENV`.
# Nothing is started, and nothing fails: without a server the tests that need one are skipped (with
# CKPTSYNC_TEST_SSHD=1 they fail).
set -u
venv=$1
packages="openssh-server openssh-client"

has() {
    command -v ssh >/dev/null && command -v ssh-keygen >/dev/null || return 1
    [ -x /usr/sbin/sshd ] || [ -x "$venv/sshd/usr/sbin/sshd" ] || command -v sshd >/dev/null
}

as_root() {  # in a container only: where services are managed, installing sshd would start one on port 22
    [ "$(id -u)" = 0 ] && [ ! -d /run/systemd/system ] || return 1
    DEBIAN_FRONTEND=noninteractive
    export DEBIAN_FRONTEND
    apt-get install -y -q --no-install-recommends $packages && return
    apt-get update -q && apt-get install -y -q --no-install-recommends $packages
}

as_user() {  # what apt would install, unpacked beside the tests' Python
    [ "$(id -u)" != 0 ] || return 1  # started by root, sshd wants a user that only its installation makes
    mkdir -p "$venv/sshd" && cd "$venv/sshd" || return 1
    missing=$(apt-get --simulate install --no-install-recommends $packages | sed -n 's/^Inst \([^ ]*\).*/\1/p')
    apt-get download $missing && for deb in *.deb; do dpkg -x "$deb" . || return 1; done
}

has && exit 0
if command -v apt-get >/dev/null; then
    log=$(mktemp)
    as_root >"$log" 2>&1 || (as_user) >>"$log" 2>&1 || tail -3 "$log"
    rm -f "$log"
fi
has || echo "no OpenSSH server here, and none could be had: tests over SSH are skipped.  Install $packages for them."
