#include "proto/rule_convert.h"

#include <limits>
#include <set>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

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

TEST(RuleConvertTest, RulesRoundTrip) {
  for (const PresetInfo& info : Presets()) {
    Rule rule = *PresetRule(info.name);
    EXPECT_EQ(RuleToProto(rule).ByteSizeLong(), info.name.size() + 2) << "only the preset is sent";
    ASSERT_TRUE(SetOption(rule, "lr", "0.1").ok());
    if (rule.family == RuleFamily::kSpectral) {
      for (const auto& [key, value] :
           std::vector<std::pair<const char*, const char*>>{{"coefficients", "convergent"},
                                                            {"steps", "5"},
                                                            {"nesterov", "false"},
                                                            {"period", "7"},
                                                            {"phase", "3"},
                                                            {"scale", "0.3"},
                                                            {"restarts", "none"}}) {
        ASSERT_TRUE(SetOption(rule, key, value).ok());
      }
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
  wire.GetReflection()->MutableUnknownFields(&wire)->AddVarint(37, 1);
  EXPECT_THAT(message(wire), HasSubstr("field 37"));
}

}  // namespace
}  // namespace stiefel
