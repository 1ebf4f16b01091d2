#!/bin/sh
# Sees to the programs that the tests start and pip does not bring: PostgreSQL's server, and a browser with its driver.
# Installs what is missing when it may; otherwise fails with the line to type.
set -eu

missing=""
# Debian keeps the server's programs out of PATH, one folder per major version.
ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || missing="$missing postgresql"
command -v chromium >/dev/null 2>&1 || missing="$missing chromium"
command -v chromedriver >/dev/null 2>&1 || missing="$missing chromium-driver"
[ -n "$missing" ] || exit 0

line="apt-get update && apt-get install -y --no-install-recommends$missing"
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "installing what the tests start:$missing"
    if output=$(DEBIAN_FRONTEND=noninteractive sh -c "$line" 2>&1); then
        exit 0
    fi
    printf '%s\n' "$output" >&2
fi
echo "error: the tests need$missing; type (as root): $line" >&2
exit 1
