#!/usr/bin/env bash
# Runs one driver of this folder: only the standard library of the system's Python.
exec python3 -B "$TEST_SRCDIR/$TEST_WORKSPACE/tests/faults/$1"
