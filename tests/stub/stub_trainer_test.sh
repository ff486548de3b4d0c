#!/usr/bin/env bash
# Runs stub_trainer.py with grpcio from PyPI. The interpreter is $STIEFEL_PYTHON where ./run prepared one; otherwise a virtual environment is made here.
set -euo pipefail
root="$TEST_SRCDIR/$TEST_WORKSPACE"
python="${STIEFEL_PYTHON:-}"
if [ -z "$python" ]; then
  python3 -m venv "$TEST_TMPDIR/venv"
  "$TEST_TMPDIR/venv/bin/pip" install --quiet --disable-pip-version-check -r "$root/tests/stub/requirements.txt"
  python="$TEST_TMPDIR/venv/bin/python"
fi
stubs="$TEST_TMPDIR/stubs"
mkdir -p "$stubs"
(cd "$root/proto" && protoc -I. --python_out="$stubs" --grpc_out="$stubs" --plugin=protoc-gen-grpc=/usr/bin/grpc_python_plugin stiefel/v1/*.proto)
exec "$python" "$root/tests/stub/stub_trainer.py" "$root/server/stiefel-server" "$root/tests/vectors/rules.json" "$stubs"
