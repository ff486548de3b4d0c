#!/usr/bin/env bash
# Runs demo_test.py on the binaries of this build.
set -euo pipefail
root="$TEST_SRCDIR/$TEST_WORKSPACE"
exec python3 "$root/tests/e2e/demo_test.py" "$root/client/examples/byte_lm/demo" \
  "$root/server/stiefel-server" "$root/client/examples/byte_lm/byte_lm"
