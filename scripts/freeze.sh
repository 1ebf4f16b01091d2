#!/bin/bash
# Writes constraints.txt from what is installed now: run it after a deliberate upgrade, and commit the difference.
set -euo pipefail
cd "$(dirname "$0")/.."
{
    echo '# Every package of the environment, pinned; `make venv` installs with it. Written by scripts/freeze.sh.'
    # pip leaves its own tools out of a freeze, and they take part in builds.
    .venv/bin/python -m pip freeze --exclude-editable --all | grep -v -i -E "^torch==" | sort -f
} > constraints.txt.new
mv constraints.txt.new constraints.txt
