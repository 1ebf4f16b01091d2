#!/bin/sh
# Fails with the line to type when the interpreter in $1 is missing or older than Headway needs.
set -eu
python=$1
if ! found=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null); then
    echo "error: '$python' does not run; install Python 3.11 or newer, or type: make PYTHON=/path/to/python3.11" >&2
    exit 2
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "error: '$python' is Python $found, Headway needs 3.11 or newer; type: make PYTHON=/path/to/python3.11" >&2
    exit 2
fi
if ! "$python" -c 'import ensurepip' 2>/dev/null; then
    echo "error: '$python' cannot make environments; type: apt-get install -y python3-venv" >&2
    exit 2
fi
