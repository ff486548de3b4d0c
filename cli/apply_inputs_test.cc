#include "cli/apply_inputs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "common/dtype.h"

namespace stiefel {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// The index of a file of these tensors.
SafetensorsIndex IndexOf(const std::vector<TensorSpec>& tensors) {
  const SafetensorsLayout layout = LayOutSafetensors(tensors, {}).value();
  return SafetensorsIndex::Parse(layout.head.substr(kSafetensorsLengthBytes), layout.data_bytes)
      .value();
}

TEST(ListGradients, GroupsStepsByName) {
  const SafetensorsIndex index = IndexOf({{"b/step10/w/step2", "BF16", {2, 3}},
                                          {"b/step10/w/step1", "F32", {2, 3}},
                                          {"a/stepx/step1", "F64", {4}},
                                          {"a/stepx/step2", "F16", {4}}});
  const auto series = ListGradients(index, std::nullopt);
  ASSERT_TRUE(series.ok()) << series.status();
  ASSERT_EQ(series->size(), 2u);
  EXPECT_EQ((*series)[0].name, "a/stepx");
  EXPECT_THAT((*series)[0].deltas, ElementsAre("a/stepx/step1", "a/stepx/step2"));
  EXPECT_EQ((*series)[1].name, "b/step10/w");
  EXPECT_THAT((*series)[1].shape, ElementsAre(2, 3));
  EXPECT_EQ((*series)[1].steps[1]->dtype, "BF16");

  const auto first = ListGradients(index, 1);
  ASSERT_TRUE(first.ok());
  EXPECT_THAT((*first)[0].deltas, ElementsAre("a/stepx/step1"));
}

TEST(ListGradients, OneGradientServesForManySteps) {
  const SafetensorsIndex index = IndexOf({{"a", "F32", {2, 3}}});
  EXPECT_THAT((*ListGradients(index, std::nullopt))[0].deltas, ElementsAre("a"));
  EXPECT_THAT((*ListGradients(index, 1))[0].deltas, ElementsAre("a"));
  const auto repeated = ListGradients(index, 3);
  ASSERT_TRUE(repeated.ok());
  EXPECT_THAT((*repeated)[0].deltas, ElementsAre("a/step1", "a/step2", "a/step3"));
  EXPECT_EQ((*repeated)[0].steps[2], &index.tensors()[0]);
}

TEST(ListGradients, RefusesWithTheReason) {
  const struct {
    std::vector<TensorSpec> tensors;
    std::optional<int64_t> steps;
    const char* part;
  } cases[] = {
      {{}, {}, "no tensors"},
      {{{"a/step1", "F32", {1}}, {"a/step3", "F32", {1}}}, {}, "a has step 3 but not step 2"},
      {{{"a/step2", "F32", {1}}}, {}, "step 2 but not step 1"},
      {{{"a/step0", "F32", {1}}}, {}, "a/step0: steps are numbered"},
      {{{"a/step01", "F32", {1}}}, {}, "a/step01"},
      {{{"a/step99999999999999999999", "F32", {1}}}, {}, "steps are numbered"},
      {{{"a", "F32", {1}}, {"a/step1", "F32", {1}}}, {}, "both plain and as a/step1"},
      {{{"a/step1", "F32", {2, 3}}, {"a/step2", "F32", {3, 2}}},
       {},
       "a is [2, 3] in step 1 and [3, 2] in step 2"},
      {{{"a/step1", "F32", {1}}, {"b/step1", "F32", {1}}, {"b/step2", "F32", {1}}},
       {},
       "a has 1 steps and b has 2"},
      {{{"a", "F32", {1}}, {"b/step1", "F32", {1}}, {"b/step2", "F32", {1}}},
       {},
       "one gradient serves for all steps"},
      {{{"a/step1", "F32", {1}}}, 2, "a has 1 steps, but --steps=2"},
      {{{"a", "I32", {1}}}, {}, "a is I32; F64, F32, F16 and BF16 are read"},
      {{{"state/a", "F32", {1}}}, {}, "those of the output"},
      {{{"w.step1", "F32", {1}}}, {}, "w.step1: gradients of steps are named NAME/step1"},
      {{{"w/Step1", "F32", {1}}}, {}, "w/Step1: gradients of steps are named NAME/step1"},
      {{{"weights/a/step1", "F32", {1}}}, {}, "those of the output"},
  };
  for (const auto& c : cases) {
    const auto series = ListGradients(IndexOf(c.tensors), c.steps);
    EXPECT_EQ(series.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(series.status().message()), HasSubstr(c.part));
  }
}

TEST(CheckValues, WhatFp32RoundsToZeroIsNoGradientThere) {
  const SafetensorsIndex index = IndexOf({{"a", "F64", {3}}});
  const TensorInfo& tensor = index.tensors()[0];
  const double tiny[] = {1e-300, 0, -1e-200}, mixed[] = {1e-300, 1e-30, 0}, zero[] = {0, 0, 0};
  EXPECT_TRUE(CheckValues(tensor, tiny, /*as_fp32=*/false).ok());
  EXPECT_THAT(std::string(CheckValues(tensor, tiny, /*as_fp32=*/true).message()),
              HasSubstr("a: all 3 elements are zero in fp32"));
  EXPECT_TRUE(CheckValues(tensor, mixed, /*as_fp32=*/true).ok());
  EXPECT_TRUE(CheckValues(tensor, zero, /*as_fp32=*/true).ok());
}

TEST(CheckValues, CountsAndSaysWhere) {
  const auto message = [](const std::string& dtype, const void* data, bool as_fp32) {
    const SafetensorsIndex index = IndexOf({{"a", dtype, {2, 3}}});
    return std::string(CheckValues(index.tensors()[0], data, as_fp32).message());
  };
  float f32[6] = {1, 2, 3, 4, std::nanf(""), INFINITY};
  EXPECT_THAT(message("F32", f32, true), HasSubstr("a: 2 of 6 elements are not finite, first at"));
  EXPECT_THAT(message("F32", f32, true), HasSubstr("[1, 1]"));
  f32[4] = f32[5] = std::numeric_limits<float>::max();
  EXPECT_EQ(message("F32", f32, true), "");

  double f64[6] = {0, 0, 1e39, 0, 0, 0};
  EXPECT_EQ(message("F64", f64, false), "");
  EXPECT_THAT(message("F64", f64, true), HasSubstr("1 of 6 elements are not finite in fp32"));
  f64[5] = -INFINITY;
  EXPECT_THAT(message("F64", f64, true), HasSubstr("2 of 6 elements are not finite, first"));

  uint16_t half[6] = {FloatToFp16(1), FloatToFp16(-INFINITY)};
  EXPECT_THAT(message("F16", half, false), HasSubstr("first at [0, 1]"));
  uint16_t bf16[6] = {FloatToBf16(1), 0, 0, 0, 0, FloatToBf16(INFINITY)};
  EXPECT_THAT(message("BF16", bf16, false), HasSubstr("first at [1, 2]"));
}

}  // namespace
}  // namespace stiefel
