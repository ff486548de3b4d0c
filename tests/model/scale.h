// How much the model tests search: STIEFEL_TEST_SCALE=full searches more.
#ifndef STIEFEL_TESTS_MODEL_SCALE_H_
#define STIEFEL_TESTS_MODEL_SCALE_H_

#include <cstdlib>
#include <cstring>

namespace stiefel::model {

inline bool FullScale() {
  const char* scale = std::getenv("STIEFEL_TEST_SCALE");
  return scale != nullptr && std::strcmp(scale, "full") == 0;
}

}  // namespace stiefel::model

#endif  // STIEFEL_TESTS_MODEL_SCALE_H_
