"""TSan settings of tests that talk through gRPC, and of the processes that they start:

cc_test(
    ...
    data = ["//tools:tsan_grpc.supp"],
    env = TSAN_GRPC,
)
"""

TSAN_GRPC = {
    # The other resolver, c-ares, is one more library that is not instrumented.
    "GRPC_DNS_RESOLVER": "native",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1:suppressions=tools/tsan_grpc.supp",
}
