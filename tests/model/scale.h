// How much the model tests search: STIEFEL_TEST_SCALE=full searches more, a sanitizer less (the
// machines are single-threaded; what it looks for shows early).
#ifndef STIEFEL_TESTS_MODEL_SCALE_H_
#define STIEFEL_TESTS_MODEL_SCALE_H_

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace stiefel::model {

inline bool FullScale() {
  const char* scale = std::getenv("STIEFEL_TEST_SCALE");
  return scale != nullptr && std::strcmp(scale, "full") == 0;
}

// `full` at full scale, else `usual`, or a tenth of it under a sanitizer.
inline int64_t Scaled(int64_t usual, int64_t full) {
  if (FullScale()) return full;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return (usual + 9) / 10;
#else
  return usual;
#endif
}

}  // namespace stiefel::model

#endif  // STIEFEL_TESTS_MODEL_SCALE_H_
