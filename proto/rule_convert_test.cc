#include "proto/rule_convert.h"

#include <limits>
#include <set>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "plan/option_samples.h"

namespace stiefel {
namespace {

using ::testing::HasSubstr;

TEST(RuleConvertTest, EveryOptionIsAFieldAndEveryFieldAnOption) {
  std::set<std::string> fields, options;
  const google::protobuf::Descriptor& descriptor = *v1::Rule::descriptor();
  for (int i = 0; i < descriptor.field_count(); ++i) fields.insert(descriptor.field(i)->name());
  for (std::string_view key : OptionKeys()) options.insert(std::string(key));
  options.insert("preset");
  EXPECT_EQ(fields, options);
}

TEST(RuleConvertTest, OnlyThePresetIsSentOfOne) {
  for (const PresetInfo& info : Presets()) {
    EXPECT_EQ(RuleToProto(*PresetRule(info.name)).ByteSizeLong(), info.name.size() + 2);
  }
}

TEST(RuleConvertTest, EveryPresetAndOptionRoundTrips) {
  for (const SampledRule& sampled : RulesWithOneOptionChanged()) {
    const absl::StatusOr<Rule> back = RuleFromProto(RuleToProto(sampled.rule));
    ASSERT_TRUE(back.ok()) << DescribeRule(sampled.rule) << ": " << back.status();
    EXPECT_EQ(Options(*back), Options(sampled.rule)) << DescribeRule(sampled.rule);
  }
}

TEST(RuleConvertTest, ManyChangesRoundTrip) {
  for (const PresetInfo& info : Presets()) {
    Rule rule = *PresetRule(info.name);
    for (const auto& [key, unused] : Options(rule)) {
      ASSERT_TRUE(SetOption(rule, key, SampleValues(key).back()).ok()) << key;
    }
    const absl::StatusOr<Rule> back = RuleFromProto(RuleToProto(rule));
    ASSERT_TRUE(back.ok()) << back.status();
    EXPECT_EQ(Options(*back), Options(rule)) << info.name;
  }
}

TEST(RuleConvertTest, ZeroMeansZeroAndUnsetTheDefault) {
  v1::Rule wire;
  wire.set_preset("muon");
  EXPECT_EQ(RuleFromProto(wire)->lr, 0.02);
  wire.set_lr(0);
  wire.set_nesterov(false);
  EXPECT_EQ(RuleFromProto(wire)->lr, 0);
  EXPECT_FALSE(RuleFromProto(wire)->nesterov);
}

TEST(RuleConvertTest, WhatDoesNotFitIsRefused) {
  const auto message = [](const v1::Rule& wire) {
    const absl::Status status = RuleFromProto(wire).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  v1::Rule wire;
  EXPECT_THAT(message(wire), HasSubstr("unknown preset"));
  wire.set_preset("muon");
  wire.set_period(0);
  EXPECT_THAT(message(wire), HasSubstr("period"));
  wire.clear_period();
  wire.set_lr(std::numeric_limits<double>::quiet_NaN());
  EXPECT_THAT(message(wire), HasSubstr("lr"));
  wire.clear_lr();
  wire.set_beta1(0.5);
  EXPECT_THAT(message(wire), HasSubstr("its coefficient is beta"));
  wire.clear_beta1();
  // CASES E18: a newer client's option is refused, not ignored.
  wire.GetReflection()->MutableUnknownFields(&wire)->AddVarint(137, 1);
  EXPECT_THAT(message(wire), HasSubstr("field 137"));
}

}  // namespace
}  // namespace stiefel
