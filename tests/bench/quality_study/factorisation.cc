#include <cmath>

#include "tests/bench/quality_study/problem.h"
#include "tests/bench/quality_study/small_matrix.h"

namespace stiefel::quality {
namespace {

constexpr int64_t kRows = 128, kCols = 96, kRank = 8, kColumns = 16;
constexpr double kSmallestSingularValue = 0.01;
constexpr double kStart = 0.05;  // deviation of the entries of U and V

class Factorisation final : public Problem {
 public:
  explicit Factorisation(uint64_t seed) {
    std::mt19937_64 random(seed);
    const SmallMatrix left = RandomOrthonormal(kRows, kRank, &random);
    const SmallMatrix right = RandomOrthonormal(kCols, kRank, &random);
    target_ =
        MultiplyTransposed(ScaleColumns(left, Geometric(kRank, kSmallestSingularValue)), right);
    target_squares_ = SumSquares(target_);
    u_ = RandomNormal(kRows, kColumns, kStart, &random);
    v_ = RandomNormal(kCols, kColumns, kStart, &random);
    du_ = SmallMatrix(kRows, kColumns);
    dv_ = SmallMatrix(kCols, kColumns);
    arrays_ = {{"u", kRows, kColumns, true, &u_.values, &du_.values},
               {"v", kCols, kColumns, true, &v_.values, &dv_.values}};
  }

  const std::vector<Array>& arrays() const override { return arrays_; }

  void Gradients(int64_t) override {
    const SmallMatrix error = Error();
    du_.values = Multiply(error, v_).values;
    dv_.values = TransposedMultiply(error, u_).values;
    for (SmallMatrix* gradient : {&du_, &dv_}) {
      for (float& value : gradient->values) value /= static_cast<float>(target_squares_);
    }
  }

  double Evaluate() override { return std::sqrt(SumSquares(Error()) / target_squares_); }

 private:
  SmallMatrix Error() const { return Difference(MultiplyTransposed(u_, v_), target_); }

  SmallMatrix target_, u_, v_, du_, dv_;
  double target_squares_ = 0;
  std::vector<Array> arrays_;
};

}  // namespace

ProblemInfo FactorisationInfo() {
  return {"factorisation",
          "128 x 96 matrix of rank 8 (singular values 1 to 0.01) as U V^T with 16 columns, whole "
          "gradients",
          "relative error |U V^T - T|_F / |T|_F", 300, 0};
}

std::unique_ptr<Problem> MakeFactorisation(uint64_t seed) {
  return std::make_unique<Factorisation>(seed);
}

}  // namespace stiefel::quality
