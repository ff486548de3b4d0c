// Stands before the system's header under ThreadSanitizer. There MapFieldBase has two members more,
// which Debian's libprotobuf, built without, knows nothing of: messages with a map field would have
// two layouts in one process.
#ifndef STIEFEL_THIRD_PARTY_PROTOBUF_TSAN_GOOGLE_PROTOBUF_MAP_FIELD_H_
#define STIEFEL_THIRD_PARTY_PROTOBUF_TSAN_GOOGLE_PROTOBUF_MAP_FIELD_H_

// The standard library still sees the macro.
#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#pragma push_macro("__SANITIZE_THREAD__")
#undef __SANITIZE_THREAD__
#include_next <google/protobuf/map_field.h>
#pragma pop_macro("__SANITIZE_THREAD__")

#endif  // STIEFEL_THIRD_PARTY_PROTOBUF_TSAN_GOOGLE_PROTOBUF_MAP_FIELD_H_
